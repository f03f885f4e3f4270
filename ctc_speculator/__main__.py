"""Train CTC draft heads, build engines with them, decode and serve losslessly.

    ctc build --model MODEL_DIR --drafter heads/ctc --out engines/
    ctc generate --bundle engines/ --prompt "How many days are there in four weeks?"

"ctc COMMAND --help" has the options and examples of a command. An error is one line on stderr; the exit
status is 2 for input that cannot be used, 1 for a run that failed or a check that did not pass, 130 after
Ctrl-C and 143 after SIGTERM.
"""

import difflib
import importlib
import sys
from dataclasses import dataclass

from runtime.core.cli import EXIT_INTERRUPTED, EXIT_USER_ERROR, exit_status, started_as

DISTRIBUTION = "ctc-speculator"


@dataclass(frozen=True)
class Command:
    """A sub-command.

    module: has ``main(argv)``, which returns an exit status; importing it imports no large library
    extra: the extra of the package that brings what it imports later
    arguments: put before those that are given
    """

    name: str
    module: str
    extra: str
    summary: str
    arguments: tuple[str, ...] = ()


COMMANDS = {
    command.name: command
    for command in (
        Command("train", "training.train", "train", "train draft heads for a Hugging Face model"),
        Command("distill", "training.distill", "train", "collect a model's answers as training data"),
        Command("build", "export.build_engines", "export", "build an engine bundle of a model and its head"),
        Command("generate", "runtime.generate", "cpu", "complete a prompt, or a file of prompts"),
        Command("profile", "runtime.profiler.__main__", "cpu", "measure a bundle against plain decoding"),
        Command(
            "serve",
            "triton_repo.serve",
            "serve",
            "serve a bundle through Triton or without it, and to OpenAI's clients",
            ("--server", "auto"),
        ),
        Command("client", "triton_repo.client", "serve", "stream a completion from a running server"),
        Command("openai", "triton_repo.openai.server", "serve", "offer a running server to OpenAI's clients"),
        Command("chat", "runtime.chat", "chat", "chat with a bundle's model in the terminal"),
        Command(
            "page", "triton_repo.page.__main__", "serve", "open a page that compares with plain decoding"
        ),
        Command(
            "publish",
            "integrations.transformers.publish",
            "train",
            "make a head ready for the Hugging Face hub",
        ),
        Command("bench", "benchmarks.methods.__main__", "bench", "compare draft heads side by side"),
    )
}
# The order of a first project: from a model to a served bundle, and what measures it.
GROUPS = {
    "a head and its engines": ("train", "distill", "build", "publish"),
    "decoding": ("generate", "chat", "profile", "bench"),
    "serving": ("serve", "client", "openai", "page"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a sub-command; returns its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        return exit_status("ctc", lambda: show(help_text()))
    if name == "--version":
        return exit_status("ctc", lambda: show(version()))
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        print(f"ctc: must be one of {', '.join(COMMANDS)}, got {name!r}{hint}", file=sys.stderr)
        return EXIT_USER_ERROR
    return run(COMMANDS[name], rest)


def show(text: str) -> int:
    print(text)
    return 0


def run(command: Command, arguments: list[str]) -> int:
    """Run one command with its arguments.

    A library that is missing is one line and status 2. Ctrl-C while libraries are imported is one line and
    status 130, also where a library makes an ImportError of it.
    """
    title = f"ctc {command.name}"
    with started_as(title):
        try:
            module = importlib.import_module(command.module)
            status: int = module.main([*command.arguments, *arguments])
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in sys.modules:  # a module of ours or of a library that is there: a defect
                raise
            wanted = f"pip install '{DISTRIBUTION}[{command.extra}]'"
            print(f"{title}: the package {package} is missing: {wanted}", file=sys.stderr)
            return EXIT_USER_ERROR
        except (ImportError, KeyboardInterrupt) as error:
            if not was_interrupted(error):
                raise
            print(f"{title}: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
    return status


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or came of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def version() -> str:
    """The version of the installed distribution, which pyproject.toml declares."""
    import importlib.metadata  # takes as long as all else that a help text needs

    return f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"


def help_text() -> str:
    """The usage, and every sub-command with what it does."""
    width = max(map(len, COMMANDS))
    lines = ["usage: ctc COMMAND [options], ctc --version, ctc --help", "", (__doc__ or "").strip()]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
