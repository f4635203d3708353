"""A callback that says what it sees, and one that ends its own process as a cluster would."""

import os
import signal

import lightning as L


class Hello(L.Callback):
    def on_train_start(self, trainer, pl_module):
        print("hello from userpkg")


class Preempt(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 1) and "PREEMPT" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
