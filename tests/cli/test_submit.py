"""The batch script is run here as Slurm runs it: the commands it calls are stand-ins on the search path."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitlab.cli.main import main
from vitlab.cli.submit import hand_over
from vitlab.jobs.sbatch import Site
from vitlab.runs.directory import RunDir

ROOT = Path(__file__).parents[2]
SITE = str(ROOT / "configs" / "cluster" / "slurm.yaml")
RECIPE = str(ROOT / "configs" / "imagenet" / "t2t_vit_14.yaml")
JOB = ["submit", "fit", "--config", RECIPE, "--slurm", SITE, "--nodes", "1", "--gpus", "2", "--time", "1:00:00"]

STAND_INS = {
    "sbatch": """
        small="allocation failure: Requested node configuration is not available"
        [ "$1" = --test-only ] && { [ -f "$DESK/small" ] && { echo "$small" >&2; exit 1; }; exit 0; }
        echo "$@" >> "$DESK/sbatch"
        [ -f "$DESK/closed" ] && { echo "sbatch: error: Invalid account" >&2; exit 1; }
        echo "4711;cluster" """,
    "scontrol": """
        echo "$@" >> "$DESK/scontrol"
        [ ! -f "$DESK/no_requeue" ]""",
    # One process for each task, each with its number; the exit code is the highest.
    "srun": """
        while [[ $1 == -* ]]; do echo "$1" >> "$DESK/srun"; shift; done
        rm -f "$DESK"/pid.*
        export SLURM_STEP_ID=0
        export SLURM_NTASKS=$TASKS SLURM_NTASKS_PER_NODE=$TASKS SLURM_NNODES=1 SLURM_NODEID=0 SLURM_NODELIST=127.0.0.1
        for ((i = 0; i < TASKS; i++)); do
            SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & echo $! > "$DESK/pid.$i"
        done
        worst=0
        for ((i = 0; i < TASKS; i++)); do
            wait "$(cat "$DESK/pid.$i")"; code=$?; [ $code -gt $worst ] && worst=$code
        done
        exit $worst""",
    # Trains until it is told to stop or until `plan` holds the exit code to end with.
    "vitlab": """
        [ "$1" = --version ] && exit
        trap 'exit 75' USR1 TERM
        printf '%s|' "$SLURM_PROCID" "$@" >> "$DESK/fit.$SLURM_PROCID"; echo >> "$DESK/fit.$SLURM_PROCID"
        [ "$SLURM_PROCID" = 0 ] && mkdir -p "$RUN" && touch "$RUN/config.yaml"
        [ -f "$DESK/plan" ] && exit "$(cat "$DESK/plan")"
        touch "$DESK/ready.$SLURM_PROCID"
        for ((t = 0; t < 1000; t++)); do sleep 0.02; done  # leaves by itself if a test fails""",
}


class Slurm:
    """What Slurm does with a script that was submitted."""

    def __init__(self, desk):
        self.desk = desk

    def script(self, name):
        return self.desk / "runs" / "slurm" / f"{name}.sbatch"

    def header(self, name):
        text = self.script(name).read_text()
        pairs = (line.removeprefix("#SBATCH --").partition("=") for line in re.findall("^#SBATCH .*", text, flags=re.M))
        return {option: value for option, _, value in pairs}

    def start(self, name, ready=None):
        options = self.header(name)
        tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
        for path in self.desk.glob("ready.*"):
            path.unlink()
        facts = {"SLURM_JOB_ID": "4711", "TASKS": str(tasks), "RUN": str(self.desk / "runs" / name)}
        self.shell = subprocess.Popen(
            ["bash", self.script(name)], env={**os.environ, **facts}, stderr=subprocess.PIPE, text=True
        )
        until = time.monotonic() + 300
        ready = ready or (lambda: len(list(self.desk.glob("ready.*"))) == tasks)
        while not ready() and self.shell.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.01)

    def signal_ranks(self, number):
        for path in self.desk.glob("pid.*"):
            os.kill(int(path.read_text()), number)

    def end(self, seconds=300):
        _, error = self.shell.communicate(timeout=seconds)
        return self.shell.returncode, error

    def said(self, command):
        path = self.desk / command
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="session")
def begun(tmp_path_factory):
    """The configuration of a run that was trained for an epoch."""
    run = tmp_path_factory.mktemp("begun") / "run"
    words = ["--trainer.max_epochs=1", "--trainer.logger=false", "--data.subset=0.02", "--data.batch_size=8"]
    assert main(["fit", "--config", str(ROOT / "configs" / "vit.yaml"), *words, "--quiet", "--run_dir", str(run)]) == 0
    return (run / "config.yaml").read_text()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder to submit from, with every command of Slurm on the search path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("DESK", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Slurm(tmp_path)


def test_a_dry_run_prints_a_script_that_bash_accepts_and_writes_nothing(slurm, capsys):
    assert main(["submit", "fit", "--config", RECIPE, "--slurm", SITE, "--nodes", "2", "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert text.startswith("#!/bin/bash\n")
    for line in ("--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=24:00:00", "--signal=USR1@120"):
        assert f"#SBATCH {line}\n" in text
    assert "#SBATCH --requeue\n" in text
    assert '"${fit[@]}" --trainer.devices=8 --trainer.num_nodes=2\n' in text
    assert not slurm.said("sbatch")
    assert not (slurm.desk / "runs").exists()


def test_a_run_at_its_time_limit_saves_is_requeued_and_continues_in_its_directory(slurm, capsys):
    assert main([*JOB, "--name", "long"]) == 0
    assert "job     4711" in capsys.readouterr().out
    assert slurm.said("sbatch") == ["--parsable runs/slurm/long.sbatch"]
    slurm.start("long")
    slurm.signal_ranks(signal.SIGUSR1)
    assert slurm.end() == (0, "")
    assert slurm.said("scontrol") == ["requeue 4711"]
    slurm.start("long")
    slurm.signal_ranks(signal.SIGUSR1)
    assert slurm.end() == (0, "")
    (slurm.desk / "plan").write_text("0")
    slurm.start("long")
    assert slurm.end() == (0, "")
    assert slurm.said("scontrol") == ["requeue 4711"] * 2
    counts = "--trainer.devices=2|--trainer.num_nodes=1|"
    for rank in ("0", "1"):
        words = f"fit|--config|{RECIPE}|--name|long|--auto_resume|{counts}"
        assert slurm.said(f"fit.{rank}") == [f"{rank}|{words}"] * 3


@pytest.mark.rare
def test_two_processes_are_warned_and_requeued_and_finish_one_run(slurm, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (slurm.desk / "bin" / "vitlab").write_text(f'#!/bin/bash\nexec {sys.executable} -m vitlab "$@"\n')
    words = ["--trainer.max_epochs=12", "--trainer.strategy=ddp", "--trainer.logger=false", "--data.subset=0.4"]
    config = str(ROOT / "configs" / "vit.yaml")
    assert main(["submit", "fit", "--config", config, *words, "--slurm", SITE, "--gpus=2", "--name", "real"]) == 0
    run = slurm.desk / "runs" / "real"
    slurm.start("real", ready=lambda: '"epoch": 1' in "".join(slurm.said("runs/real/metrics.jsonl")))
    slurm.signal_ranks(signal.SIGUSR1)
    assert slurm.end(120)[0] == 0
    assert slurm.said("scontrol") == ["requeue 4711"]
    assert json.loads((run / "run.json").read_text())["status"] == "preempted"
    slurm.start("real", ready=lambda: False)
    assert slurm.end(120)[0] == 0
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["attempts"], record["world_size"]) == ("done", 2, 2)
    rows = [json.loads(line) for line in slurm.said("runs/real/metrics.jsonl")]
    assert [row["epoch"] for row in rows if "val/loss" in row] == list(range(12))
    assert slurm.said("scontrol") == ["requeue 4711"], "a run that is done is not requeued"


def test_the_third_attempt_in_a_row_without_progress_ends_the_job(slurm):
    assert main([*JOB, "--name", "stuck"]) == 0
    (slurm.desk / "plan").write_text("75")
    manifest = slurm.desk / "runs" / "stuck" / "checkpoints" / "manifest.json"
    (slurm.desk / "bin" / "srun").write_text(
        f'#!/bin/bash\n[ -f "$DESK/moves" ] && echo "{{\\"step\\": $RANDOM$(date +%N)}}" > {manifest}\nexit 75\n'
    )
    manifest.parent.mkdir(parents=True)
    codes, errors = [], []
    for moves in (False, False, True, True, False, False, False):
        (slurm.desk / "moves").touch() if moves else (slurm.desk / "moves").unlink(missing_ok=True)
        slurm.start("stuck", ready=lambda: False)
        code, error = slurm.end()
        codes.append(code)
        errors.append(error)
    assert codes == [0] * 6 + [1]
    assert "three attempts in a row saved no new step" in errors[-1]
    assert slurm.said("scontrol") == ["requeue 4711"] * 6


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ("folder", "there is no folder /nowhere, from which the job was submitted; nothing was started"),
        ("config", "cannot read own.yaml, in {desk}; nothing was started"),
        ("vitlab", "`vitlab` does not start: ModuleNotFoundError: No module named 'vitlab'; nothing was started"),
    ],
)
def test_a_node_that_lacks_what_the_job_needs_ends_it_with_one_line(slurm, monkeypatch, lacks, told, nodes):
    own = slurm.desk / "own.yaml"
    own.write_text(Path(RECIPE).read_text())
    words = ["--config", "own.yaml", "--slurm", SITE, f"--nodes={nodes}", f"--gpus={2 // nodes}", "--name", "n"]
    assert main(["submit", "fit", *words]) == 0
    monkeypatch.setenv("SLURM_SUBMIT_DIR", "/nowhere" if lacks == "folder" else str(slurm.desk))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    if lacks == "config":
        own.unlink()
    if lacks == "vitlab":
        broken = "echo Traceback >&2; echo \"ModuleNotFoundError: No module named 'vitlab'\" >&2; exit 1"
        (slurm.desk / "bin" / "vitlab").write_text(f"#!/bin/bash\n{broken}\n")
    slurm.start("n", ready=lambda: False)
    line = f"vitlab: node n7: {told.format(desk=slurm.desk)}\n"
    assert slurm.end() == (2, line * nodes)  # a line for each node
    assert not slurm.said("fit.0") and not slurm.said("scontrol")


def test_a_run_that_has_started_no_longer_needs_its_config_file(slurm):
    own = slurm.desk / "own.yaml"
    own.write_text(Path(RECIPE).read_text())
    assert main(["submit", "fit", "--config", "own.yaml", "--slurm", SITE, "--gpus=1", "--name", "n"]) == 0
    (slurm.desk / "plan").write_text("75")
    slurm.start("n", ready=lambda: False)
    assert slurm.end() == (0, "")
    own.unlink()
    (slurm.desk / "plan").write_text("0")
    slurm.start("n", ready=lambda: False)
    assert slurm.end() == (0, "") and len(slurm.said("fit.0")) == 2


@pytest.mark.parametrize("code", [1, 2, 130, 137])
def test_a_run_that_failed_is_not_requeued(slurm, code):
    assert main([*JOB, "--name", "bad"]) == 0
    (slurm.desk / "plan").write_text(str(code))
    slurm.start("bad")
    assert slurm.end()[0] == code
    assert not slurm.said("scontrol")


def test_a_rank_that_is_warned_before_vitlab_has_begun_is_requeued(slurm):
    assert main([*JOB, "--name", "early"]) == 0
    (slurm.desk / "bin" / "vitlab").write_text(
        '#!/bin/bash\n[ "$1" = --version ] && exit\n[ "$SLURM_PROCID" = 0 ] && exit 75\nkill -USR1 $$\n'
    )
    codes = []
    for _ in range(3):
        slurm.start("early", ready=lambda: False)
        codes.append(slurm.end()[0])
    assert codes == [0, 0, 1], "the third attempt without progress ends the job"
    assert slurm.said("scontrol") == ["requeue 4711"] * 2


def test_a_cancelled_job_saves_and_stays_cancelled(slurm):
    assert main([*JOB, "--name", "stopped"]) == 0
    slurm.start("stopped")
    slurm.shell.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert slurm.shell.poll() is None, "the shell waits for the ranks"
    slurm.signal_ranks(signal.SIGTERM)
    assert slurm.end()[0] == 75
    assert not slurm.said("scontrol")


def test_if_slurm_does_not_requeue_the_log_says_how_to_continue(slurm):
    assert main([*JOB, "--name", "long"]) == 0
    (slurm.desk / "no_requeue").touch()
    slurm.start("long")
    slurm.signal_ranks(signal.SIGUSR1)
    code, error = slurm.end()
    assert code == 75
    assert "sbatch runs/slurm/long.sbatch" in error


def test_arguments_reach_fit_as_they_were_typed(slurm):
    (slurm.desk / "a recipe.yaml").write_text(Path(RECIPE).read_text())
    strange = "--data.root=$(touch evil) 'x' \"y\" {z}"
    words = ["--config", "a recipe.yaml", "--model.pos_embed", "sincos2d", strange, "--quiet"]
    weights = ["--init_from", "w.pth", "--resize", "rescale", "--init_grid", "4,2"]
    assert main(["submit", "fit", *words, "--slurm", SITE, "--gpus=2", "--name", "n", *weights]) == 0
    (slurm.desk / "plan").write_text("0")
    slurm.start("n")
    assert slurm.end() == (0, "")
    slurm.start("n")
    slurm.end()
    first, again = (line.split("|")[2:-3] for line in slurm.said("fit.0"))
    assert first == again == [*words[:-1], "--name", "n", *weights, "--auto_resume", "--quiet"]
    assert not (slurm.desk / "evil").exists()


def test_a_finished_or_stopped_run_is_submitted_again_by_its_name(slurm, begun):
    run = slurm.desk / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(begun)
    (slurm.desk / "plan").write_text("0")
    longer = ["--trainer.max_epochs=90"]
    ways = {("--resume", "old"): ["--resume", "runs/old", *longer]}
    ways["--name", "old", "--auto_resume"] = [*longer, "--name", "old", "--auto_resume"]
    for typed, started in ways.items():
        assert main(["submit", "fit", *typed, *longer, "--slurm", SITE, "--gpus=1"]) == 0
        slurm.start("old")
        assert slurm.end() == (0, "")
        assert slurm.said("fit.0")[-1].split("|")[2 : 2 + len(started)] == started


def test_runs_of_one_last_name_have_a_script_each(slurm, capsys):
    words = [*JOB, "--run_dir"]
    assert [main([*words, place]) for place in ("exp1/seed0", "exp2/seed0", "exp1/seed0/")] == [0, 0, 2]
    assert "seed0 was submitted before" in capsys.readouterr().err
    assert main([*words, "runs/é"]) == main([*words, "runs/ü"]) == main([*JOB, "--name", "seed0"]) == 0
    scripts = {path.stem: path.read_text() for path in (slurm.desk / "runs" / "slurm").glob("*.sbatch")}
    assert len(scripts) == 5 and "seed0" in scripts
    assert sum("exp1/seed0" in text for text in scripts.values()) == 1


def test_a_site_names_its_partition_gpu_and_modules(slurm):
    site = slurm.desk / "site.yaml"
    site.write_text(
        'time: "2-12:00:00"\nnodes: 1\ngpus: 1\ngpu_type: h100\ncpus_per_task: 3\nwarn_seconds: 300\n'
        "sbatch: {partition: gpu long, mem: 0, exclusive: true}\nsetup: [touch loaded]\n"
    )
    assert main(["submit", "fit", "--config", RECIPE, "--slurm", str(site), "--name", "s"]) == 0
    header = slurm.header("s")
    wanted = {"time": "2-12:00:00", "gpus-per-node": "h100:1", "cpus-per-task": "3", "signal": "USR1@300"}
    assert header.items() >= {**wanted, "partition": "'gpu long'", "mem": "0", "exclusive": "", "requeue": ""}.items()
    (slurm.desk / "plan").write_text("0")
    slurm.start("s")
    slurm.end()
    assert (slurm.desk / "loaded").exists()
    assert "--cpus-per-task=3" in slurm.said("srun")


@pytest.mark.rare
def test_a_name_is_chosen_once_and_differs_between_jobs(slurm):
    assert main(JOB) == 0
    assert main([*JOB, "--model.depth=2"]) == 0
    names = [path.stem for path in (slurm.desk / "runs" / "slurm").iterdir()]
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"\d{8}-\d{6}_t2t-vit-14_s42_[0-9a-f]{4}-[0-9a-f]{6}", name) for name in names)
    assert main([*JOB, "--seed_everything=7", "--name", "x"]) == 0
    assert main([*JOB, "--name", "x"]) == 2, "it waits in the queue"


def test_a_job_that_sbatch_refuses_is_reported_and_leaves_nothing(slurm, capsys):
    (slurm.desk / "closed").touch()
    assert main([*JOB, "--name", "n"]) == 1
    assert capsys.readouterr().err == "vitlab: sbatch refused the job: sbatch: error: Invalid account\n"
    assert not slurm.script("n").exists()


def test_a_resubmission_that_sbatch_refuses_leaves_the_earlier_script(slurm):
    script, run = slurm.script("n"), slurm.desk / "runs" / "n"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert hand_over("first\n", script, run) == 0
    (slurm.desk / "closed").touch()
    assert hand_over("second\n", script, run) == 1
    assert script.read_text() == "first\n"


def test_a_command_without_a_config_is_submitted(slurm, monkeypatch, capsys):
    monkeypatch.setattr("vitlab.jobs.train.build.check_job", lambda arguments, options: None)
    words = ["--model=Classifier", "--data=Digits", "--data.batch_size=64"]
    assert main(["submit", "fit", *words, "--slurm", SITE, "--gpus=1", "--name", "n", "--dry_run"]) == 0
    assert f"fit=(vitlab fit {' '.join(words)} --name n --auto_resume)\n" in capsys.readouterr().out


def test_a_job_too_large_for_every_node_is_refused_instead_of_waiting_forever(slurm, capsys):
    (slurm.desk / "small").touch()
    assert main([*JOB, "--name", "n"]) == 1
    error = capsys.readouterr().err
    assert error.endswith("sbatch refused the job: allocation failure: Requested node configuration is not available\n")
    assert not slurm.said("sbatch") and not slurm.script("n").exists()


def test_the_script_trusts_what_was_trusted_and_keeps_the_deadline(slurm, capsys, monkeypatch):
    (slurm.desk / "mine.py").write_text("")
    monkeypatch.syspath_prepend(slurm.desk)
    assert main([*JOB, "--name", "n", "--trust_imports", "mine", "--deadline", "30", "--dry_run"]) == 0
    (fit,) = re.findall(r"^fit=\((.*)\)$", capsys.readouterr().out, re.M)
    assert "--auto_resume --trust_imports mine --deadline 30" in fit


def test_submitting_without_slurm_says_so(here, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(here))
    assert main([*JOB]) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    assert main([*JOB, "--dry_run"]) == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("5:30", 330), ("1:00:05", 3605), ("2-12", 216000), ("1-00:30", 88200), ("1-2:03:04", 93784)],
)
def test_limits_are_read_as_sbatch_reads_them(text, seconds):
    assert Site(time=text, warn_seconds=(seconds - 61) // 2).time == text
    with pytest.raises(ValueError, match="more than twice"):
        Site(time=text, warn_seconds=(seconds - 60) // 2 + 1)


MISTAKES = [
    (["submit"], "vitlab submit --help"),
    (["submit", "fitt", "--slurm", SITE], 'did you mean "fit"?'),
    (["submit", "fit", "--config", RECIPE], "--slurm"),
    (["submit", "fit", "--slurm", SITE], "missing: data, model; give a complete config"),
    (["submit", "fit", "--config", RECIPE, "--slurm", "nowhere.yaml"], "nowhere.yaml"),
    (["submit", "fit", "--config", "nowhere.yaml", "--slurm", SITE], "nowhere.yaml"),
    (["submit", "fit", "--resume", "nope", "--slurm", SITE], 'no run or checkpoint called "nope"'),
    ([*JOB, "--nodes", "0"], "`nodes` must be a whole number of at least 1, got 0"),
    ([*JOB, "--gpus", "many"], "--gpus"),
    ([*JOB, "--gpus", "7"], "must be divisible by the number of processes, got 512 and 7"),
    ([*JOB, "--nodes=3", "--data.batch_size=64"], "must be divisible by the number of processes, got 64 and 6"),
    ([*JOB, "--time", "tomorrow"], "`time` must be a limit that sbatch takes, got 'tomorrow'"),
    ([*JOB, "--time", "4:00"], "more than 300 s, got 4:00 and 120"),
    ([*JOB, "--name", "a/b"], "use --run_dir for a path"),
    ([*JOB, "--name", "slurm"], "choose another name"),
    ([*JOB, "--name", "there"], "--resume runs/there"),
    ([*JOB, "--overwrite"], "each time it is requeued"),
    ([*JOB, "--trainer.devices=4"], "`--trainer.devices` comes from --gpus"),
    ([*JOB, "--trainer.num_nodes", "4"], "`--trainer.num_nodes` comes from --nodes"),
    ([*JOB, "--trainer.logger.init_args.api_key=canary"], "looks like a secret"),
    ([*JOB, "--model.lrr=3"], "there is no key `model.lrr`"),
    (
        ["submit", "fit", "--config", "vit", "--slurm", SITE, "--gpus=1", "--model.num_heads=5"],
        "`model.num_heads` must",
    ),
    (["submit", "fit", "--resume", "real", "--slurm", SITE, "--gpus=1", "--model.lr=3"], "the configuration differs"),
    (["submit", "fit", "--resume", "there", "--slurm", SITE, "--gpus=3"], "got 64 and 3"),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_a_mistake_is_one_line_and_submits_nothing(arguments, told, slurm, capsys, begun):
    (slurm.desk / "runs" / "there").mkdir(parents=True)
    (slurm.desk / "runs" / "there" / "config.yaml").write_text("data: {batch_size: 64}\n")
    (slurm.desk / "runs" / "real").mkdir()
    (slurm.desk / "runs" / "real" / "config.yaml").write_text(begun)
    environment = dict(os.environ)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert "canary" not in error
    assert dict(os.environ) == environment
    assert not slurm.said("sbatch")
    assert not (slurm.desk / "runs" / "slurm").exists()


SITES = [
    ("nodes: 1", 'must have a `time`, as in time: "24:00:00"'),
    ("time: 24:00:00", "write it in quotes"),  # YAML 1.1 reads a number of seconds
    ('time: "1:00:00"\nnode: 2', 'there is no key `node`; did you mean "nodes"?'),
    ('time: "1:00:00"\ngpus: 1.5', "`gpus` must be a whole number of at least 1, got 1.5"),
    ('time: "1:00:00"\ngpus: 1\ngpus: 2', "the key `gpus` appears twice"),
    ('time: "1:00:00"\nsbatch: {ntasks-per-node: 2}', "`sbatch.ntasks-per-node` is set by `gpus`"),
    ('time: "1:00:00"\nsbatch: {-p: gpu}', "without dashes"),
    ('time: "1:00:00"\nsbatch: {chdir: /scratch}', "`sbatch.chdir` is set by the folder that you submit from"),
    ('time: "1:00:00"\nsbatch: {comment: "x\\n#SBATCH --nodes=9"}', "must be a word, a number or true"),
    ('time: "1:00:00"\nsetup: module load cuda', "`setup` a list of shell lines"),
    ('time: "1:00:00"\nsetup: [export WANDB_API_KEY=canary]', "must hold no secret"),
    ('time: "1:00:00"\nsbatch: {password: canary}', "looks like a secret"),
]


@pytest.mark.parametrize(("text", "told"), SITES, ids=[told for _, told in SITES])
def test_a_mistake_in_the_site_file_is_one_line(text, told, slurm, capsys):
    (slurm.desk / "site.yaml").write_text(text)
    assert main(["submit", "fit", "--config", RECIPE, "--slurm", "site.yaml"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert "canary" not in error


def test_no_file_is_read_after_the_job_is_submitted(slurm, monkeypatch, capsys):
    """A failing file system would end with 1, although the job waits, and its repetition with 2."""
    exists = RunDir.exists

    def failing(self):
        if slurm.said("sbatch"):
            raise OSError(errno.EIO, "Input/output error", str(self.path))
        return exists(self)

    monkeypatch.setattr(RunDir, "exists", failing)
    assert main([*JOB, "--name", "far"]) == 0
    assert "job     4711" in capsys.readouterr().out
