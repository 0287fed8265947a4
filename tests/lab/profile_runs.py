"""The small training that profiles are tested on."""

from prunus.lab.run import Run


def small(text, **options):
    base = {"model": "gpt2-tiny", "context": 16, "batch": 2, "steps": 100, "every": 5, "device": "cpu"}
    return Run(**base | {"data": text} | options)
