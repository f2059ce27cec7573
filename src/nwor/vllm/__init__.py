"""The vLLM plugin: staging pages under a stock engine.

plugin      entry point: gates, then start-up hooks; nothing heavy before the gates
settings    every NWOR_* variable, declared once
seams       the ledger: which vLLM symbols are relied on, why, checked against which versions
eligibility can this engine be served, and if not, why
reservation staging pages kept back from the scheduler
startup     hooks on what runs once: cache configuration, runner, scheduler, stat loggers
geometry    which tables and rows a runner has; probe: is a row where we think it is
windows     the windows of a runner: what V1 and V2 have in common
runner_v1   where they begin and end in the V1 runner
runner_v2   where they begin and end in the V2 runner
interpreter the V2 runner on a CPU
stats       counters on their way from the worker to /metrics and the log
"""
