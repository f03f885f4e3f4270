"""What a launcher knows about its models, for everybody who answers a request."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

LOADING = "the models are being loaded"


class Health:
    """Whether the models can serve, and if not, why.

    problem: why no model can serve at the moment; None if they can
    failed: the models that did not load, each with the reason
    num_requests: requests that are being answered over HTTP
    """

    def __init__(self, problem: str | None = LOADING) -> None:
        self.problem = problem
        self.failed: Mapping[str, str] = {}
        self.num_requests = 0

    def serve(self, failed: Mapping[str, str]) -> None:
        self.problem, self.failed = None, failed

    def stop_serving(self, problem: str) -> None:
        self.problem = problem

    def problem_of(self, model: str) -> str | None:
        """Why this model cannot serve; None if nothing is known against it."""
        if self.problem is None and model in self.failed:
            return f"{model} did not load: {self.failed[model]}"
        return self.problem

    @property
    def any_problem(self) -> str | None:
        """Why not all models can serve."""
        return next(filter(None, [self.problem, *map(self.problem_of, self.failed)]), None)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


def failed_models(index: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Those of the models that failed to load, each with the reason, from Triton's repository index.

    Their state is UNAVAILABLE. A model that is still loading has the state LOADING, or no state yet.
    """
    failed = (model for model in index if model["name"] in names and model.get("state") == "UNAVAILABLE")
    return {model["name"]: one_line(model.get("reason", "")) for model in failed}


def one_line(reason: str) -> str:
    """A model's reason, without what Triton puts before and behind a Python exception's message."""
    return re.sub(r"^(Internal|Invalid argument): (\w+: )?", "", reason.strip().partition("\n")[0])
