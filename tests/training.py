"""How tests train with Lightning's own Trainer."""

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
QUIET |= {"accelerator": "cpu"}
