"""Callbacks of a training loop, as in Lightning.

class SaveForHub(pipedream.callbacks.Callback):
    def on_checkpoint(self, pipeline, folder):
        pipeline.save_pretrained(folder / "pretrained")

pipedream.Recipe(..., callbacks=[pipedream.callbacks.EarlyStopping("loss"), SaveForHub()])
"""

from pipedream.services.callbacks.callbacks import Callback as Callback, EarlyStopping as EarlyStopping
