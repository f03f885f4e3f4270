"""How a bundle decodes that is asked for one of ``runtime.core.bundle.METHODS``."""

from runtime.core.bundle import CTC, DRAFT, METHODS, PLAIN, STREAMS, BundleManifest
from runtime.core.errors import RequestError


def choose_method(
    manifest: BundleManifest, method: str | None, where: object, *, option: str = "method"
) -> str:
    """``draft`` or ``plain``; by default ``draft`` where the bundle has a draft head.

    where, option: what messages call the bundle and the setting
    Raises RequestError, which says what the bundle holds, if it cannot decode as it is asked to, or not with
    drafts although nothing else was asked for.
    """
    spec = manifest.drafter
    if method is None:
        method = DRAFT if spec else PLAIN
    if method not in METHODS:
        raise RequestError(f"{option}: must be one of {', '.join(METHODS)}, got {method!r}")
    if method == PLAIN:
        return PLAIN
    if spec is None:
        raise RequestError(f"{option}: {where} holds no draft head, so it can only decode with 'plain'")
    kind, own = f"a {spec.drafter_type} head", None
    if spec.has_streams:
        kind, own = f"{kind} of speculative streams", STREAMS
    elif spec.drafter_type == CTC:
        own = CTC
    if method not in (DRAFT, own):
        ways = ", ".join(repr(each) for each in (own, DRAFT) if each)
        raise RequestError(
            f"{option}: {where} holds {kind}, which decodes with {ways} or {PLAIN!r}, got {method!r}"
        )
    if spec.drafts_in_verify_pass and manifest.engine_plan is not None:
        raise RequestError(
            f"{option}: {where} holds {kind} for {manifest.target}, which is compiled and checked only; its "
            f"engines decode with {PLAIN!r}, and streams with a bundle of the target onnxruntime"
        )
    return DRAFT
