"""Histories in the manner of Jepsen: several trainers want one run directory, and all that they rely on fails.

A trainer takes the lock, the token, and writes rows, checkpoints and records as `vitlab fit` does, through the same
functions, without a network: a history takes seconds. What is not simulated: caches of a network file system, which may
show a token late.
"""

import fcntl
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from harness import CONTEXT

SCALE = 0.05  # a minute without a sign of life is three seconds
FAULTS = (
    *("remove the lock", "remove run.json", "remove config.yaml", "remove metrics.jsonl", "remove everything"),
    *("stop", "kill", "clock +1 h", "clock -1 h", "nothing"),
)


def train(folder, name, host, seed, flock, utime):
    """Train as process ``name`` of ``host``, again and again, until the file ``stop`` exists."""
    from vitlab.errors import UsageError
    from vitlab.runs import lock, run_lock
    from vitlab.runs.directory import RunDir
    from vitlab.runs.fence import RunGone
    from vitlab.runs.generations import BackgroundCheckpointIO, rotate, sweep, writing

    os.setpgid(0, 0)
    draw = random.Random(seed)
    lock.DEAD, lock.TOUCH, lock.LOOK, run_lock.LEAVING = 60 * SCALE, 10 * SCALE, 0.05, 0.2
    lock._place = lambda: {"host": host}
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    fail(draw, flock, utime)
    run = RunDir(folder / "run")
    while not (folder / "stop").exists():
        try:
            with run_lock.locked(run):
                run.take_over()
                note(folder, name, "starts", run.fence.token)
                if not run.config.is_file():
                    run.write_text("config.yaml", "a: 1\n")
                known = (
                    torch.load(last, weights_only=True) if (last := run.last_checkpoint()) else {"step": 0, "bytes": 0}
                )
                run.drop_later_rows(known["bytes"], known["step"])
                sweep(run.checkpoints)
                files, step = BackgroundCheckpointIO(), known["step"]
                while not (folder / "stop").exists() and draw.random() > 0.01:
                    step += 1
                    run.append_row({"step": step, "value": f"{run.fence.token}-{step}"})
                    note(folder, name, "works", run.fence.token)
                    if step % 3 == 0:
                        size = run.metrics.stat().st_size
                        facts = {"step": step, "token": run.fence.token}
                        files.finish = partial(rotate, run.checkpoints, ["last"], facts, fence=run.fence)
                        files.save_checkpoint({"step": step, "bytes": size}, run.checkpoints / writing(run.fence))
                        if files.wait():
                            break
                    run.update("run.json", step=step)
                    time.sleep(draw.uniform(0, 0.02))
        except RunGone:
            note(folder, name, "lost", run.fence.token)
            run = RunDir(folder / "run")
        except (UsageError, OSError):
            time.sleep(0.05)
    os._exit(0)


def fail(draw, flock, utime):
    """Make locks fail always, or dates often."""
    if flock:

        def no_flock(*words):
            raise OSError(37, "No locks available")

        fcntl.flock = no_flock
    if utime:
        real = os.utime

        def bad_utime(*words, **more):
            if draw.random() < 0.5:
                raise OSError(116, "Stale file handle")
            return real(*words, **more)

        os.utime = bad_utime


def note(folder, name, what, token):
    """Write outside of the run what a trainer is doing."""
    with (folder / f"log-{name}").open("a") as file:
        file.write(json.dumps([time.monotonic(), what, token]) + "\n")


def history(folder, seed, seconds=6.0):
    """Run one history; return what contradicts the model, as text, and the number of faults."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    flock, utime = draw.random() < 0.5, draw.random() < 0.3
    hosts = draw.choice([["a", "a"], ["a", "b"], ["a", "b", "b"]])
    line = [(folder, str(i), host, seed * 10 + i, flock, utime) for i, host in enumerate(hosts)]
    alive = {i: CONTEXT.Process(target=train, args=words, daemon=True) for i, words in enumerate(line)}
    for process in alive.values():
        process.start()
    done = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(draw.uniform(0.1, 0.8))
        fault = draw.choice(FAULTS)
        done.append(fault)
        with suppress(ProcessLookupError):  # it has just ended
            disturb(fault, folder / "run", alive, draw)
        for i, process in alive.items():
            if not process.is_alive():
                alive[i] = CONTEXT.Process(target=train, args=line[i], daemon=True)
                alive[i].start()
    time.sleep(1.0)  # whoever was stopped finds out
    (folder / "stop").touch()
    for process in alive.values():
        process.join(3)
        if process.is_alive():
            process.kill()
    how = f"seed {seed} ({'no flock, ' if flock else ''}{'bad utime, ' if utime else ''}{hosts}, {done})"
    return [f"{how}: {wrong}" for wrong in judge(folder)], len(done)


def histories(folder, seeds, at_once=4):
    """Run histories, some at a time as they mostly wait; return their number, and what contradicts the model."""
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda seed: history(folder / str(seed), seed), seeds))
    texts = [path.read_text() for path in folder.glob("*/log-*")]
    return {
        "histories": len(found),
        "attempts": sum(text.count('"starts"') for text in texts),
        "faults": sum(faults for _, faults in found),
        "wrong": [text for wrong, _ in found for text in wrong],
    }


def disturb(fault, run, alive, draw):
    """Do harm to the directory, or to one of the processes."""
    process = draw.choice(list(alive.values()))
    names = {"remove the lock": ".lock"}
    match fault.split():
        case ["remove", "everything"]:
            for path in [*run.glob("*"), *run.glob(".*")]:
                path.unlink(missing_ok=True) if not path.is_dir() else None
        case ["remove", *_]:
            (run / names.get(fault, fault.split()[-1])).unlink(missing_ok=True)
        case ["stop"] if process.is_alive():
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(draw.choice([0.1, 60 * SCALE * 1.5]))
            os.kill(process.pid, signal.SIGCONT)
        case ["kill"]:
            process.kill()
            process.join()
        case ["clock", sign, _]:
            now = time.time() + (3600 if sign == "-1" else -3600)
            if (run / ".lock").exists():
                os.utime(run / ".lock", (now, now))


def judge(folder):
    """Return what contradicts the model: one attempt at a time writes, and no step has two rows."""
    from vitlab.runs.directory import RunDir
    from vitlab.runs.manifest import damage

    wrong = []
    run = RunDir(folder / "run")
    rows = run.rows()
    steps = [row["step"] for row in rows]
    if len(steps) != len(set(steps)):
        wrong.append(f"{len(steps) - len(set(steps))} steps are recorded twice")
    events = sorted(
        (*json.loads(text), path.name) for path in folder.glob("log-*") for text in path.read_text().splitlines()
    )
    taken = [token for _, what, token, _ in events if what == "starts"]
    began = {token: at for at, what, token, _ in events if what == "starts"}
    for at, what, token, _ in events:
        if what != "works":  # who loses the run before it starts has a token all the same
            continue
        later = [began[other] for other in taken if began[other] > began[token]]
        if later and at - min(later) > 15 * SCALE + 0.3:
            wrong.append(f"{token} worked {at - min(later):.1f} s after another had taken over")
            break
    order = {token: i for i, token in enumerate(taken)}
    writers = [order[row["value"].partition("-")[0]] for row in rows]
    if writers != sorted(writers):
        wrong.append("a row of an earlier attempt follows one of a later attempt")
    wrong += [f"{path.name}: {damage(path)}" for path in run.checkpoints.glob("*.ckpt") if damage(path)]
    return wrong


def main():
    """Run histories with seeds of a range: FOLDER FIRST LAST."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    found = histories(folder, range(first, last))
    sys.stdout.write("".join(f"{text}\n" for text in found["wrong"]))
    sys.stdout.write(f"{found['histories']} histories, {found['attempts']} attempts, {found['faults']} faults, ")
    sys.stdout.write(f"{len(found['wrong'])} contradictions\n")


if __name__ == "__main__":
    main()
