"""TAB in bash: the words are asked of a real shell."""

import shutil
import subprocess

import pytest

from vitlab.cli.main import COMMANDS, main

CASES = [
    (["vitlab", "pre"], ["predict"]),
    (["vitlab", "fit", "--config", "cifar100_"], ["cifar100_t2t", "cifar100_vit"]),
    (["vitlab", "fit", "--config", "=", "fashion_mnist_t"], ["fashion_mnist_t2t"]),
    (["vitlab", "fit", "--trainer.max_ep"], ["--trainer.max_epochs"]),
    (["vitlab", "fit", "--model.t2t_ke"], ["--model.t2t_kernels"]),
    (["vitlab", "test", "--data.batch"], ["--data.batch_size"]),
    (["vitlab", "test", "fi"], ["first"]),
    (["vitlab", "fit", "--resume", ""], ["last", "first", "second"]),
    (["vitlab", "fit", "--resume", "=", "s"], ["second"]),
    (["vitlab", "runs", "cl"], ["clean"]),
    (["vitlab", "runs", "diff", "sec"], ["second"]),
    (["vitlab", "bench", ""], []),
    (["vitlab", "look", ""], ["last", "first", "second"]),
    (["vitlab", "embed", "s"], ["second"]),
    (["vitlab", "analyze", "cos"], ["cost"]),
    (["vitlab", "analyze", "cost", "f"], ["first"]),
    (["vitlab", "ablate", "pl"], ["plan"]),
    (["vitlab", "ablate", "report", "lab.yaml", "--accept_s"], ["--accept_stale"]),
    (["vitlab", "runs", "list", "--whe"], ["--where"]),
    (["vitlab", "submit", "fit", "--sl"], ["--slurm"]),
    (["vitlab", "submit", "fit", "--auto"], ["--auto_resume"]),
    (["vitlab", "export", "--t"], ["--trust_imports", "--to"]),
    (["vitlab", "look", "--im"], ["--images", "--img_size"]),
    (["vitlab", "posbench", "--da"], ["--data"]),
    (["vitlab", "test", "--ckp"], ["--ckpt_path"]),
    (["vitlab", "test", "--js"], ["--json"]),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_commands_configs_keys_and_runs_without_python(tmp_path, capsys):
    for name in ("first", "second", "ablations", "slurm"):  # of which the last two are no runs
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    for words, _ in CASES:
        line = " ".join(f"'{word}'" for word in words)
        script += f'\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _vitlab; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(
        ["bash", "-u", "-c", script], cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == [found for _, found in CASES]
