"""Three processes that train one network while one is killed again and again, with TorchFT and with torchrun.

TorchFT (`pip install torchft`) is a peer to compare with, no part of vitlab: the others go on in their processes, and
the new one gets weights and moments from the memory of a peer. Its loop is written out here, as it takes the place of
Lightning's strategy. torchrun starts all processes again, which go on from the last checkpoint.

``python tests/faults/elastic.py torchft|torchrun FOLDER STEPS SECONDS KILLS``
"""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from harness import differences, until

BATCH = 36
PAUSE = float(os.environ.get("VITLAB_PAUSE", 0.1))  # seconds that a step takes longer: kills hit many of them


def work(folder, name, lighthouse, steps):
    """Train as one of the replicas of TorchFT, until all steps are committed."""
    import torch
    from sklearn.datasets import load_digits
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    from vitlab.models.create import create_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = create_model("vit_ti16", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=2,
                       num_heads=2, drop_path_rate=0.0)  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    quick = timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=quick), min_replica_size=1, use_async_quorum=False, timeout=quick,
        quorum_timeout=timedelta(seconds=60), connect_timeout=quick, rank=0, world_size=1, replica_id=name,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
        load_state_dict=lambda state: (net.load_state_dict(state["net"]), optimizer.load_state_dict(state["moments"])),
        state_dict=lambda: {"net": net.state_dict(), "moments": optimizer.state_dict()},
    )  # fmt: skip
    log = (folder / f"log-{name}").open("a", buffering=1)
    log.write(json.dumps(["starts", manager.current_step(), time.time()]) + "\n")
    while manager.current_step() < steps:
        manager.start_quorum()
        n, rank, step = manager.num_participants(), manager.participating_rank(), manager.current_step()
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[:BATCH]
        mine = chosen[rank::n]  # the global batch is the same for any number of processes
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.cross_entropy(net(images[mine]), labels[mine], reduction="sum") / BATCH
        loss.backward()
        flat = torch.cat([*(p.grad.flatten() for p in net.parameters()), loss.detach().view(1)]) * n
        manager.allreduce(flat).wait()  # the mean of n shares, each n times its part of the sum
        time.sleep(PAUSE)
        if not manager.should_commit():
            log.write(json.dumps(["repeats", step, n, time.time()]) + "\n")
            continue
        start = 0
        for p in net.parameters():
            p.grad.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()
        optimizer.step()
        log.write(json.dumps(["step", step, n, float(flat[-1]), time.time()]) + "\n")
    torch.save(net.state_dict(), folder / f"weights-{name}.pt")
    time.sleep(3)  # the others commit their last step
    os._exit(0)


def torchft(folder, steps, seconds, kills, seed=0):
    """Train with three replicas, of which one is killed every so many seconds and started again; return the figures."""
    from torchft.coordination import LighthouseServer

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchft", "vitlab.models.create", "sklearn.datasets"])
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    house = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50,
                             heartbeat_timeout_ms=1000)  # fmt: skip

    def start(name):
        process = context.Process(target=work, args=(folder, name, house.address(), steps), daemon=True)
        process.start()
        return process

    alive = {name: start(name) for name in "abc"}
    assert until(lambda: len([*folder.glob("log-*")]) == 3, seconds=120, every=0.1)
    killed, due = [], time.monotonic() + seconds
    while any(process.is_alive() for process in alive.values()):
        time.sleep(0.1)
        finished = any((folder / f"weights-{name}.pt").exists() for name in alive)
        if len(killed) < kills and time.monotonic() > due and not finished:
            name = draw.choice("abc")
            alive[name].kill()
            alive[name].join()
            killed.append((name, time.time()))
            due = time.monotonic() + seconds
            alive[name] = start(name)
        for name, process in alive.items():
            if process.exitcode not in (None, 0) and not finished:
                alive[name] = start(name)
    house.shutdown()
    return figures(folder, killed)


def figures(folder, killed):
    """Return what the logs say: kills, steps done twice, repeated attempts, processes in a step, and the curve."""
    rows = [json.loads(text) for path in folder.glob("log-*") for text in path.read_text().splitlines()]
    done = {}
    for row in rows:
        if row[0] == "step":
            done.setdefault(row[1], []).append(row)
    values = {step: {round(row[3], 9) for row in found} for step, found in done.items()}
    return {
        "kills": len(killed),
        "steps": len(done),
        "steps with two values": sum(len(found) > 1 for found in values.values()),
        "attempts given up": len({(row[1], row[2]) for row in rows if row[0] == "repeats"}),
        "steps of fewer than three": sum(min(row[2] for row in found) < 3 for found in done.values()),
        "curve": [done[step][0][3] for step in sorted(done)],
    }


def slow():
    """Make every step take its time."""
    from vitlab.tasks import Classifier

    step = Classifier.training_step

    def slower(self, *words, **more):
        time.sleep(PAUSE)
        return step(self, *words, **more)

    Classifier.training_step = slower


def torchrun(folder, steps, seconds, kills, python, seed=0):
    """Train under torchrun with a checkpoint each step, and kill one of three processes every so many seconds.

    ``folder`` is best in memory, as /dev/shm. ``python`` starts the processes: a server that has imported everything.
    """
    from harness import TINY

    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    words = [*TINY, "--trainer.accelerator=cpu", "--data.batch_size=36", f"--trainer.max_steps={steps}"]
    words += ["--trainer.max_epochs=-1", "--checkpoint.every_n_steps=1"]
    more = ["--trainer.devices=3", "--trainer.strategy=ddp"]
    how = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", "--max_restarts=999", "-m", "vitlab"]
    run, lost, launch = folder / "runs" / "killed", [], f"launch{time.monotonic_ns()}"
    facts = os.environ | {"VITLAB_LAUNCH": launch, "VITLAB_PYTHON": str(python.path), "OMP_NUM_THREADS": "1"}
    facts |= {"VITLAB_BEFORE": "elastic:slow"}
    line = [python.path, *how, *words, "--name", "killed", "--auto_resume"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(line, cwd=folder, env=facts, stdout=log, stderr=subprocess.STDOUT)
    due = time.monotonic() + seconds
    while process.poll() is None:
        time.sleep(0.05)
        if len(lost) < kills and time.monotonic() > due and (run / "checkpoints" / "last.ckpt").is_file():
            ranks = [pid for pid, what in python.alive(launch).items() if "torch.distributed" not in what]
            before = steps_of(run)
            if not ranks or not before:
                continue
            os.kill(draw.choice(ranks), signal.SIGKILL)
            last, known = steps_of(run)[max(before)][-1], max(before)
            until(lambda known=known: max(steps_of(run), default=0) > known, seconds=120, every=0.02)
            again = steps_of(run)
            lost.append(last - (again[max(again)][0] - 1) if max(again) > known else "?")
            due = time.monotonic() + seconds
    line = [python.path, "-m", "vitlab", *words, *more, "--name", "whole"]
    subprocess.run(line, cwd=folder, env={**facts, "VITLAB_BEFORE": ""}, check=True)
    wrong = differences(run, folder / "runs" / "whole")
    return {"code": process.returncode, "kills": len(lost), "steps lost a kill": lost, "different": wrong, "curve": []}


def steps_of(run):
    """Return the steps that each attempt has recorded so far, by its number."""
    path, found = run / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        if line.endswith("}") and "train/loss" in (row := json.loads(line)):
            found.setdefault(row["attempt"], []).append(row["step"])
    return found


def main():
    """Run one of the two ways."""
    from forked import Python

    folder, steps, seconds, kills = Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    if sys.argv[1] == "torchft":
        found = torchft(folder, steps, seconds, kills)
    else:
        with Python() as python:
            found = torchrun(folder, steps, seconds, kills, python)
    with suppress(OSError):
        (folder / "curve.json").write_text(json.dumps(found.pop("curve")))
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
