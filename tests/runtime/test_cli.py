"""What every command line does with an error."""

import pytest

from runtime.cli import exit_status
from runtime.errors import DeviceError, RequestError


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RequestError("top_p: must be above 0"), 2, "name: top_p: must be above 0\n"),
        (DeviceError("cuda:0: this machine has 0 GPUs"), 1, "name: cuda:0: this machine has 0 GPUs\n"),
        (KeyboardInterrupt(), 130, "name: interrupted\n"),
    ],
)
def test_an_error_is_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    assert exit_status("name", command) == status
    assert capsys.readouterr().err == line
