"""The decoders that all parts share, since loading engines takes seconds."""

from runtime.core.bundle import Bundle
from runtime.core.errors import DeviceError, RequestError
from runtime.decoder import GRAPH_STEP, SpeculativeDecoder
from runtime.device.device import CPU
from runtime.device.step import GraphStep
from runtime.engines.ort_wheel import check_installed
from runtime.load.device import open_device


class Decoders:
    """A decoder for every method, loaded when it is first asked for.

    bundle: verified; all decoders run its graph steps on ``device``
    max_num_seqs, max_length: of every decoder
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str,
        *,
        max_num_seqs: int,
        max_length: int,
        num_threads: int | None = None,
    ):
        self.bundle = bundle
        self.max_num_seqs, self.max_length = max_num_seqs, max_length
        self.device, self.num_threads = device, num_threads
        self._open: dict[str, SpeculativeDecoder] = {}

    def get(self, method: str) -> SpeculativeDecoder:
        """The decoder of a method. If the device lacks memory for two, the other one is closed."""
        if method not in self._open:
            try:
                self._open[method] = self._load(method)
            except DeviceError:
                if not self._open:
                    raise
                self.close()
                self._open[method] = self._load(method)
        return self._open[method]

    def runner(self, method: str) -> GraphStep:
        return runner_of(self.get(method))

    def close(self) -> None:
        """Free the memory of all decoders; they are loaded anew when they are asked for again."""
        while self._open:
            _, decoder = self._open.popitem()
            try:
                runner_of(decoder).close()
            except DeviceError:
                # This decoder had failed before, and its failure was reported then.
                continue

    def _load(self, method: str) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_bundle(
            self.bundle.path,
            method=method,
            step=GRAPH_STEP,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            max_length=self.max_length,
            num_threads=self.num_threads,
            verify=False,
        )


def check_device(bundle: Bundle, device: str | None) -> str:
    """The device's name, by default what the bundle's target runs on, after opening and closing it.

    Raises RequestError for a name of no device or of one on which the target does not run, UserError if the
    target's library is missing, and DeviceError where this machine has no such device.
    """
    target, plan = bundle.manifest.target, bundle.manifest.engine_plan
    if device is None:
        device = "cuda:0" if bundle.manifest.is_for_gpu else CPU
    if plan and device == CPU:
        raise RequestError(
            f"--device: {bundle.path} holds engines of {target}, which run on a GPU, not on cpu"
        )
    if not bundle.manifest.is_for_gpu:
        check_installed()
    opened, _ = open_device(bundle, device, None)
    opened.close()
    return device


def most_context(bundle: Bundle) -> int:
    """Positions that a sequence of this bundle may have at most."""
    plan = bundle.manifest.engine_plan
    return plan.max_context if plan else bundle.manifest.model.max_position_embeddings


def runner_of(decoder: SpeculativeDecoder) -> GraphStep:
    """The decoder's runner, whose steps are graphs."""
    runner = decoder.batch.runner
    assert isinstance(runner, GraphStep), type(runner)
    return runner
