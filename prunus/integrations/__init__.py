"""The trainers people use: each file forwards a trainer's events to ``Pruner``, and needs that trainer alone."""
