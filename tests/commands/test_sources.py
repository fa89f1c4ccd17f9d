"""`dlprof sources` lists every format with what it brings; of one it says all that is known."""

from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.read.formats import formats


def test_every_format_is_listed() -> None:
    done = CliRunner().invoke(cli, ["sources"])
    assert done.exit_code == 0
    first = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert first == [one.name for one in formats()]
    assert all((one.left or one.brings) in done.stdout for one in formats())


def test_one_format_says_all_and_another_name_what_there_is() -> None:
    done = CliRunner().invoke(cli, ["sources", "horovod"])
    assert all(
        text in done.stdout for text in next(one for one in formats() if one.name == "horovod").described.values()
    )
    wrong = CliRunner().invoke(cli, ["sources", "horovodd"])
    assert wrong.exit_code != 0
    assert "there are:" in wrong.output
