"""Compares the first minibatch of a pipeline with the user's model, run plainly on the same data.

1. When the first minibatch is read, the input stage's first worker runs the whole model on it, in the microbatches of
   the pipeline: `ReferenceRun.read`. It also compares the loss of the whole minibatch with those of its parts.
2. Loss, gradients and buffers become fingerprints, which all ranks get.
3. The pipeline trains. Each stage compares its buffers after the minibatch's last forward, and its gradients before its
   first update (`StageCheck`). Each rank compares the loss.

Where the model does not fit one worker as a whole, each stage runs its own layers instead (`LayersCheck`).
"""
