"""Operators of this project for ONNX Runtime on a CPU, which g++ compiles for the processor that runs them.

``runtime/engines/source`` has their code. A graph that uses them is a file beside the portable one
(``export.pipeline``), and is run where there is a compiler. A layer is 5 operators there. Its
attention gives a row the same bits wherever its keys lie, and its products read weights once for all nodes of
a tree.

The library is kept in a directory of the user's cache for the next start, under a name that says what it was
compiled from, by what and for which processor.
"""

import functools
import hashlib
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path

from runtime.core.errors import RequestError
from runtime.core.system import cache_directory, replace_file
from runtime.engines.ort_wheel import ort

LOGGER = logging.getLogger(__name__)
# The variable that names another directory for the library; empty to compile none.
DIRECTORY_VARIABLE = "CTC_OPERATOR_CACHE"
# The domain of the operators in a graph.
DOMAIN = "ctc_speculator"
COMPILER = "g++"
# What a processor needs, as Linux calls it. Intel's servers have it since 2019, AMD's processors since 2022.
INSTRUCTIONS = "avx512_vnni"
SOURCES = Path(__file__).with_name("source")
MAIN = "operators.cpp"
# Sums of products are rounded once where the processor can. No flag may change the order of a sum.
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-fno-exceptions", "-shared", "-fPIC")


@functools.cache
def operator_library() -> Path | None:
    """The compiled library; None, with a line in the log, where there is none.

    The first call compiles it, which takes three seconds, unless a process before this one has. Raises
    RequestError where ONNX Runtime is not installed.
    """
    try:
        directory = cache_directory("operators", DIRECTORY_VARIABLE)
        processor = describe_processor()
        if directory is None:
            return None
        if INSTRUCTIONS not in processor or shutil.which(COMPILER) is None:
            LOGGER.info("standard operators are used: others need %s and %s", INSTRUCTIONS, COMPILER)
            return None
        library = compiled(directory, processor)
        ort.SessionOptions().register_custom_ops_library(str(library))
        return library
    except subprocess.CalledProcessError as error:
        cause = next(iter(error.stderr.splitlines()), "")
        LOGGER.warning("%s cannot compile the operators of this project: %s", COMPILER, cause)
    except (RuntimeError, OSError) as error:
        LOGGER.warning(
            "the operators of this project cannot be compiled, and %s may name a directory for them: %s",
            DIRECTORY_VARIABLE,
            error,
        )
    except RequestError:
        raise  # ONNX Runtime is not installed
    except Exception as error:  # its own kind is none of Python's
        LOGGER.warning(
            "ONNX Runtime %s cannot load the operators of this project: %s", ort.__version__, error
        )
    return None


def compiled(directory: Path, processor: str) -> Path:
    """The library in a directory, which is compiled if it is not there.

    processor: a description of what the compiler may make use of
    Raises CalledProcessError with the compiler's messages, and OSError.
    """
    library = directory / library_name(processor)
    if library.is_file():
        return library
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / library.name
        _output_of(COMPILER, *FLAGS, str(SOURCES / MAIN), "-o", str(result))
        replace_file(library, result.read_bytes())
    return library


def library_name(processor: str) -> str:
    """The name of the library's file, which says what it is compiled from, how and for what."""
    content = "\n".join((*FLAGS, _output_of(COMPILER, "--version"), processor))
    for source in sorted(SOURCES.iterdir()):
        content += source.read_text(encoding="utf-8")
    return f"operators-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def describe_processor() -> str:
    """The model and the instructions of this machine's processor; empty where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(("model name", "flags")))
