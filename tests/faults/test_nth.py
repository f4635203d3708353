"""The n-th call to the file system fails: a share of all n here, every n with VITLAB_NTH=1."""

import os

import pytest
from nth import COMMANDS, loop

SHARE = float(os.environ.get("VITLAB_NTH", 0.2)) * float(os.environ.get("VITLAB_FAULTS_SHARE", 1))
LONG = {"fit": 0.1, "analyze": 0.1}  # of their thousands of calls, a tenth of the share


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", COMMANDS)
def test_whichever_call_fails_the_command_ends_in_one_line_or_goes_on_rightly(tmp_path, note, command):
    share = SHARE if SHARE >= 1 else SHARE * LONG.get(command, 1)
    found = loop(tmp_path / "loop", [command], share)[command]
    note(
        f"`vitlab {command}`: {found['injected']} of its {found['calls']} calls to the file system x 4 errors fail "
        "(Python's calls; libraries in C++ and Rust are not seen)",
        f"{len(found['wrong'])} tracebacks, lines without a path, exits 0 without a result, or failed repetitions",
        "0",
    )
    assert not found["wrong"], "\n".join(found["wrong"])
