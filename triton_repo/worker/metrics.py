"""The metrics of a worker's models in the text form that Prometheus reads.

Series have the names that Triton gives them. prometheus_client would end the names of counters in ``_total``.
"""

from collections.abc import Iterator, Mapping

from triton_repo.triton.metrics import HISTOGRAMS, PREFIX

CONTENT_TYPE = "text/plain; version=0.0.4"
# The ends of the names of a histogram's series.
PARTS = ("_bucket", "_sum", "_count")


class Series:
    """The value of one series."""

    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, amount: float) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class SeriesFamily:
    """The series of one name, by their labels as they are shown."""

    def __init__(self, description: str, kind: str):
        self.description, self.kind = description, kind
        self.series: dict[str, Series] = {}

    def Metric(self, *, labels: Mapping[str, str]) -> Series:
        shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
        return self.series.setdefault(shown, Series())


class Registry:
    """The families of all models of a process."""

    def __init__(self) -> None:
        self._families: dict[str, SeriesFamily] = {}

    def family(self, name: str, description: str, kind: str) -> SeriesFamily:
        """The family of this name, which several models share."""
        return self._families.setdefault(name, SeriesFamily(description, kind))

    def text(self) -> str:
        """All series, as https://prometheus.io/docs/instrumenting/exposition_formats has them."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        families = dict(self._families)
        for name, (_, description) in HISTOGRAMS.items():
            parts = [f"{PREFIX}{name}{part}" for part in PARTS]
            if parts[0] in families:
                yield from _head(f"{PREFIX}{name}", description, "histogram")
                for part in parts:
                    yield from _samples(part, families.pop(part))
        for name, family in families.items():
            yield from _head(name, family.description, family.kind)
            yield from _samples(name, family)


def _head(name: str, description: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"


def _samples(name: str, family: SeriesFamily) -> Iterator[str]:
    for labels, series in family.series.items():
        yield f"{name}{{{labels}}} {series.value!r}"
