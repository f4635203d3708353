"""The whole catalogue with its figures: `make faults`. A handful runs with `make test` too."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time

import pytest
from harness import CONFIGS, Process, curve, differences, finish, until
from hostile import images, mutations, pickles
from kills import FIT, OFTEN, kills_in_writing, random_kills, twin, usable
from ranks import lose_a_rank
from users import photos as make_photos

SHARE = float(os.environ.get("VITLAB_FAULTS_SHARE", 1))  # of the kills, files and mutations: `make faults-quick`
faults = pytest.mark.faults
whole = [faults, pytest.mark.timeout(900)]


@pytest.mark.rare
def test_a_few_kills_at_random_moments_lose_nothing(tmp_path):
    found = random_kills(tmp_path, kills=2, seed=7)
    assert (found["unusable"], found["diverged"]) == (0, 0)


@pytest.mark.rare
@pytest.mark.slow
def test_a_few_fuzzed_files_are_decoded_or_named(tmp_path, finished):
    found = images(tmp_path, finished, count=42)
    assert (found["silent"], found["crashes"]) == (0, 0), found


@pytest.mark.rare
def test_a_few_mutated_configurations_are_refused(tmp_path):
    found = mutations(tmp_path, count=18, seed=5)
    assert not found["wrong"]


@faults
@pytest.mark.timeout(900)
def test_kills_at_random_moments(tmp_path, note):
    found = random_kills(tmp_path, kills=round(50 * SHARE))
    note(
        f"{found['kills']} SIGKILLs at random moments of {found['runs']} runs, a checkpoint every 2 steps",
        f"{found['unusable']} unusable runs, {found['diverged']} diverged from the undisturbed one (weights and curve)",
        "0, 0",
    )
    assert found["kills"] >= round(50 * SHARE)
    assert (found["unusable"], found["diverged"]) == (0, 0), found


@faults
@pytest.mark.timeout(900)
def test_kills_while_a_checkpoint_is_written(tmp_path, note):
    found = kills_in_writing(tmp_path, kills=round(20 * SHARE))
    note(
        f"{found['kills']} SIGKILLs while a checkpoint was being written",
        f"{found['torn']} torn `last.ckpt`, {found['diverged']} diverged",
        "0, 0",
    )
    assert found["kills"] >= round(20 * SHARE)
    assert (found["torn"], found["diverged"]) == (0, 0), found


@faults
@pytest.mark.timeout(600)
def test_weird_and_fuzzed_images(tmp_path, finished, note):
    found = images(tmp_path, finished, count=round(250 * SHARE))
    note(
        f"{found['files']} image files: {found['files'] - round(250 * SHARE)} weird ones, {round(250 * SHARE)} fuzzed",
        f"{found['decoded']} decoded, {found['named']} named with a reason, {found['silent']} silent, "
        f"{found['crashes']} crashes",
        "0 silent, 0 crashes",
    )
    assert (found["silent"], found["crashes"]) == (0, 0), found


@faults
@pytest.mark.timeout(900)
def test_mutated_configurations(tmp_path, note):
    found = mutations(tmp_path, count=round(200 * SHARE))
    note(
        f"{found['mutations']} mutated shipped configs: typos, wrong types, numbers out of range, missing, double keys",
        f"{found['refused']} refused in one line that names the key, {found['tracebacks']} tracebacks, "
        f"{len(found['wrong'])} other ends",
        f"{found['mutations']}, 0, 0",
    )
    assert not found["wrong"]


@faults
@pytest.mark.timeout(600)
def test_malicious_files(tmp_path, finished, note):
    found = pickles(tmp_path, finished, every=1 if SHARE == 1 else 8)
    note(
        f"{found['attempts']} reads of malicious files: init_from, resume, test, validate, predict, export, analyze",
        f"{found['executions']} executions, {found['accepted']} accepted, {found['tracebacks']} tracebacks",
        "0, 0, 0",
    )
    assert (found["executions"], found["accepted"], found["tracebacks"]) == (0, 0, 0), found


LOSSES = [
    ("killed", signal.SIGKILL, 1, "rank 1"),
    ("stopped", signal.SIGSTOP, 1, "rank 1"),
    ("killed", signal.SIGKILL, 0, "rank 0"),
    ("stopped", signal.SIGSTOP, 0, "rank 0"),
]


@faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("how", "number", "which", "named"), LOSSES if SHARE == 1 else LOSSES[2:3], ids=str)
def test_a_lost_rank(tmp_path, note, how, number, which, named):
    found = lose_a_rank(tmp_path, number, which)
    run = tmp_path / "runs" / "two"
    before = max(step for kind, step in curve(run) if kind == "train")
    single = ["--trainer.devices=1", "--trainer.strategy=auto", "--quiet"]
    resumed = Process(["fit", "--resume", "two", *single], tmp_path)
    goes_on = until(lambda: max((step for _, step in curve(run)), default=0) > before, resumed, 90)
    resumed.send(signal.SIGTERM)
    code = resumed.wait(60)
    note(
        f"process {which} of two {how}",
        f"the other ended after {found['seconds']:.0f} s, the rank {'' if named in found['said'] else 'not '}named; "
        f"{len(found['orphans'])} orphans; resume {'works' if goes_on and code == 75 else 'fails'}",
        "under 60 s, named, 0 orphans, works",
    )
    assert found["seconds"] < 60
    assert named in found["said"]
    assert not found["orphans"]
    assert found["status"] == "failed"
    assert "Traceback" not in found["said"]
    assert (goes_on, code) == (True, 75), resumed.output()


@faults
@pytest.mark.timeout(600)
def test_a_disk_that_fills_up(tmp_path, note):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False
    ).returncode
    if mounted != 0:
        pytest.skip("mounting a small file system takes privileges")
    try:
        words = [*FIT, *OFTEN, "--trainer.max_epochs=200", "--run_dir", str(place / "run")]
        process = Process(words, tmp_path)
        assert until((place / "run" / "metrics.jsonl").exists, process), process.output()
        filler = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(filler, bytes(4096))
        os.close(filler)
        code = process.wait(100)
        said, good = process.output(), usable(place / "run")
        note(
            "the disk fills up during a run",
            f"exit {code}, {'path and space told' if 'MB' in said and str(place) in said else said[-200:]}, "
            f"checkpoints {'whole' if good else 'damaged'}",
            "exit 1, told, whole",
        )
        assert code == 1
        assert "No space left on device" in said
        assert "--resume" in said
        assert "Traceback" not in said
        assert good
        (place / "filler").unlink()
        resumed = Process(["fit", "--resume", str(place / "run")], tmp_path)
        time.sleep(4)
        resumed.send(signal.SIGTERM)
        assert resumed.wait(60) == 75, resumed.output()
    finally:
        subprocess.run(["umount", place], check=False)


@faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["refuses", "is silent"] if SHARE == 1 else ["is silent"])
def test_weights_and_biases_out_of_reach(tmp_path, note, kind):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "is silent":
            server.listen(50)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        keys = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": address, "WANDB_MODE": "online"}
        words = ["fit", "--config", str(CONFIGS / "vit.yaml"), "--trainer.max_epochs=1", "--name", "far"]
        started = time.monotonic()
        process = Process(words, tmp_path, environment=keys)
        rows = tmp_path / "runs" / "far" / "metrics.jsonl"
        until(rows.exists, process, 100)
        seconds = time.monotonic() - started
        code = process.wait(200)
    said = process.output()
    whole = len((tmp_path / "runs" / "far" / "metrics.jsonl").read_text().splitlines())
    note(
        f"W&B {kind} from the start",
        f"first step after {seconds:.0f} s in all, exit {code}, {whole} rows of metrics",
        "trains, exit 0",
    )
    assert code == 0, said
    assert said.count("this run stays offline") == 1
    assert "Traceback" not in said
    assert list((tmp_path / "runs" / "far" / "wandb").glob("offline-run-*"))
    assert seconds < 45


@faults
@pytest.mark.timeout(300)
def test_signals_to_every_phase(tmp_path, note):
    reference = twin(tmp_path)
    ends = {}
    for phase, number in [
        ("checkpoint", signal.SIGTERM),
        ("validation", signal.SIGUSR1),
        ("first step", signal.SIGTERM),
    ]:
        name = phase.replace(" ", "-")
        process = Process([*FIT, *OFTEN, "--name", name], tmp_path, before=MOMENTS[phase])
        run = tmp_path / "runs" / name
        assert until((tmp_path / "reached").exists, process), process.output()
        process.send(number)
        code = process.wait(100)
        (tmp_path / "reached").unlink()
        ends[phase] = code
        assert "Traceback" not in process.output()
        assert json.loads((run / "run.json").read_text())["status"] == "preempted", process.output()
        finish([*FIT, *OFTEN, "--name", name, "--resume"], tmp_path)
        assert not differences(run, reference)
    note(
        "signals during a checkpoint, a validation, the first step",
        f"exit codes {list(ends.values())}, 0 diverged",
        "75",
    )
    assert set(ends.values()) == {75}


def _wait_in(cls, name, after=0):
    method = getattr(cls, name)
    calls = []

    def waiting(self, *args, **kwargs):
        calls.append(name)
        if len(calls) == after + 1:
            open("reached", "w").close()
            time.sleep(1)
        return method(self, *args, **kwargs)

    setattr(cls, name, waiting)


def _in_checkpoint():
    from vitlab.runs.generations import BackgroundCheckpointIO

    _wait_in(BackgroundCheckpointIO, "save_checkpoint", 3)


def _in_validation():
    from vitlab.tasks import Classifier

    _wait_in(Classifier, "validation_step", 6)


def _in_first_step():
    from vitlab.tasks import Classifier

    _wait_in(Classifier, "training_step")


MOMENTS = {"checkpoint": _in_checkpoint, "validation": _in_validation, "first step": _in_first_step}


def _sleep_in_validation():
    from vitlab.tasks import Classifier

    step, calls = Classifier.validation_step, []

    def slow(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:  # two are in the sanity check
            open("reached", "w").close()
            time.sleep(25)
        return step(self, *args, **kwargs)

    Classifier.validation_step = slow


def _twice(process):
    process.send(signal.SIGINT)
    time.sleep(1)
    process.send(signal.SIGINT)


def _stop_a_worker(process):
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(workers.split()[0]), signal.SIGSTOP)


SHOWS = {
    "Ctrl-C twice, a second apart, in a validation step of 25 s": ([], _sleep_in_validation, _twice, 130, 3, ""),
    "SIGHUP in training": ([], None, lambda p: p.send(signal.SIGHUP), 75, 10, "stopped by SIGHUP; continue with"),
    "a worker of the loader stopped, --deadline 3": (["workers"], None, _stop_a_worker, 75, 60, "is stopped"),
}


@faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", SHOWS)
def test_hanging_or_interrupted_processes_end_in_time(tmp_path, note, fault):
    more, before, harm, must, seconds, line = SHOWS[fault]
    words = [*[word for word in FIT if word != "--quiet"], "--trainer.max_epochs=500", "--name", "a"]
    if more:
        photos = ["--data=ImageFolder", f"--data.root={make_photos(tmp_path)}", "--data.num_workers=2"]
        words += [*photos, "--data.img_size=16", "--deadline=3"]
    process = Process(words, tmp_path, before=before)
    ready = tmp_path / "reached" if before else tmp_path / "runs" / "a" / "metrics.jsonl"
    assert until(lambda: ready.exists() and (before or curve(ready.parent)), process), process.output()
    started = time.monotonic()
    harm(process)
    code = process.wait(100)
    took = time.monotonic() - started
    said = [text for text in process.output().splitlines() if line and line in text]
    note(
        fault,
        f"exit {code} after {took:.1f} s{f': {said[0].strip()[:160]}' if said else ''}",
        f"exit {must} in {seconds} s",
    )
    assert code == must, process.output()
    assert took < seconds
    assert said or not line, process.output()
    assert "Traceback" not in process.output()


@faults
@pytest.mark.timeout(300)
def test_two_runs_of_one_directory(tmp_path, note):
    first = Process([*FIT, "--trainer.max_epochs=500", "--name", "one"], tmp_path)
    assert until((tmp_path / "runs" / "one" / "metrics.jsonl").exists, first), first.output()
    second = Process(["fit", "--resume", "one"], tmp_path)
    third = Process([*FIT, "--name", "one", "--overwrite"], tmp_path)
    codes = [second.wait(60), third.wait(60)]
    named = all(f"process {first.pid} on " in p.output() for p in (second, third))
    first.send(signal.SIGKILL)
    first.wait()
    after = Process(["fit", "--resume", "one", "--quiet"], tmp_path)
    time.sleep(3)
    after.send(signal.SIGTERM)
    end = after.wait(60)
    note(
        "a second run, and a resume, into a directory in use",
        f"exit {codes}, {'naming' if named else 'not naming'} pid and host; after a SIGKILL the stale lock is "
        f"{'recognized' if end == 75 else 'in the way'}",
        "2, named, recognized",
    )
    assert (codes, named, end) == ([2, 2], True, 75), after.output()


def test_every_number_of_the_page_has_a_table(tmp_path):
    from report import table

    (tmp_path / "a.json").write_text(json.dumps({"fault": "f", "found": "0 lost", "must": "0"}))
    kills = {"W&B on": {"kills": 9, "runs": 2, "unusable": 0, "dead": ["exit 1"], "diverged": []}}
    (tmp_path / "kills").write_text(json.dumps(kills))
    text = table(tmp_path, tmp_path / "kills")
    assert "| f | 0 lost | 0 |" in text
    assert "9 SIGKILLs from the first millisecond on, in 2 runs | 1 dead ends, 0 unusable, 0 diverged |" in text
