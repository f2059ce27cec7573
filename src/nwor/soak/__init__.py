"""Soak: random traffic on a tiny model for as long as you like, with integrity checks all along.

    tiny      a seeded model of a few thousand weights, and texts it writes without speculation
    traffic   which requests arrive when, how long they are, what is drafted, when they are aborted
    sizes     the model and the sizes that both engines have
    ledger    what was done, what was checked, what was wrong first
    on_transformers, on_vllm    one engine each: runs a wave of traffic, looks at its own books
    run       waves until the time is up
    report    table and JSON
    cli       ``python -m nwor.soak``

Imports go upwards in this list only.
"""
