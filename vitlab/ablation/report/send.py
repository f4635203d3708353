"""An ablation's report as one W&B run."""

import os
from pathlib import Path
from typing import Any

from vitlab.jobs.train.wandb import has_key, prepare_environment


def send_report(name: str, project: str, mode: str | None, folder: Path, page: Path, summary: Path) -> str:
    """Send an ablation's report to W&B as one run of its group, offline without an API key; return a line about it.

    Args:
        name: Name of the ablation, which is the group of its cells too.
        project: The project.
        mode: online or offline; None for what the machine can.
        folder: Where an offline run lies.
        page: The report as one HTML file.
        summary: Its numbers as CSV.
    """
    way: Any = os.environ.get("WANDB_MODE") or ("offline" if mode == "offline" or not has_key() else "online")
    prepare_environment()
    try:
        import pandas as pd
        import wandb

        names: Any = {"project": project, "group": name, "job_type": "report", "name": f"{name} report"}
        with wandb.init(**names, mode=way, dir=str(folder)) as run:
            table = pd.read_csv(summary, keep_default_na=False, na_values=[""]).astype(object)
            table = table.where(table.notna(), None)
            run.log({"summary": wandb.Table(dataframe=table, allow_mixed_types=True), "report": wandb.Html(page)})
    except Exception as error:  # the files are the record; W&B may fail in many ways
        return f"W&B      not sent: {' '.join(str(error).split())[:300]}"
    if way == "online":
        return f"W&B      project {project}, group {name}"
    return f"W&B      {way}; upload it with `wandb sync {folder}/wandb/offline-run-*`"
