"""A soak of vLLM, sound at first, then with one thing wrong at a time; prints what the soaks say.

python soak_mutants.py RECORD

Starting an engine takes longer than breaking it, so there is one. Every mutant is a fork of the process
with the sound engine: nothing has to be mended.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from nwor.metrics import Metrics
from nwor.soak import cli
from nwor.soak.on_vllm import VllmSoak
from nwor.store.overlay_window import OverlayWindow
from nwor.store.staging import NOBODY, StagingPages

COMMAND = ["--engine", "vllm", "--seed", "3"]


def every(number: int) -> Callable[[], bool]:
    """Tell, call by call, whether it is the n-th again."""
    calls = itertools.count(1)
    return lambda: next(calls) % number == 0


# -- nwor: leases, windows ---------------------------------------------------------------------------


def leases_are_kept(soak: VllmSoak) -> None:
    StagingPages.release = lambda self, request: None


def a_lease_is_lost(soak: VllmSoak) -> None:
    release = StagingPages.release

    def wrong(self: StagingPages, request: Any) -> None:
        release(self, request)
        del self._free[3:]

    StagingPages.release = wrong


def staging_begins_in_the_schedulers_blocks(soak: VllmSoak) -> None:
    soak._runner.nwor.overlay.pages.first_page -= 1


def a_lease_is_denied(soak: VllmSoak) -> None:
    """Its request is written through instead: correct, but nothing is staged."""
    lease = StagingPages.lease
    StagingPages.lease = lambda self, requests: [NOBODY, *lease(self, requests)[1:]]


def a_window_stays_open(soak: VllmSoak) -> None:
    """Its edits are undone, but it says that it is open."""
    close = OverlayWindow.close

    def wrong(self: OverlayWindow) -> None:
        close(self)
        self.is_open = True

    OverlayWindow.close = wrong


def one_row_too_few(soak: VllmSoak) -> None:
    commit = OverlayWindow.commit
    OverlayWindow.commit = lambda self, accepted: commit(self, (accepted - 1).clip(0))


def one_row_too_many(soak: VllmSoak) -> None:
    commit = OverlayWindow.commit

    def wrong(self: OverlayWindow, accepted: Any) -> None:
        commit(self, (accepted + 1).clip(0, self.batch.num_drafts))

    OverlayWindow.commit = wrong


def a_draft_is_not_counted(soak: VllmSoak) -> None:
    count = Metrics.count_commit
    Metrics.count_commit = lambda self, *, drafts, **rest: count(
        self, drafts=max(drafts - 1, 0), **rest
    )


def a_commit_raises(soak: VllmSoak) -> None:
    def wrong(self: OverlayWindow, accepted: Any) -> None:
        raise ZeroDivisionError("nine")

    OverlayWindow.commit = wrong


# -- vLLM: blocks, requests --------------------------------------------------------------------------


def a_block_is_lost(soak: VllmSoak) -> None:
    pool, due = soak._scheduler.kv_cache_manager.block_pool, every(20)
    free = pool.free_blocks
    pool.free_blocks = lambda blocks: free(list(blocks)[1:] if due() else blocks)


def a_block_counts_an_owner_too_many(soak: VllmSoak) -> None:
    pool = soak._scheduler.kv_cache_manager.block_pool
    new = pool.get_new_blocks

    def wrong(number: int) -> Any:
        blocks = new(number)
        for block in blocks[:1]:
            block.ref_cnt += 1
        return blocks

    pool.get_new_blocks = wrong


def blocks_stay_with_a_request_that_is_gone(soak: VllmSoak) -> None:
    """One time: with many, the others would wait for ever."""
    manager, calls = soak._scheduler.kv_cache_manager, itertools.count()
    free = manager.free
    manager.free = lambda request: None if next(calls) == 9 else free(request)


def a_request_stays_with_the_scheduler(soak: VllmSoak) -> None:
    """Its blocks are given back, its name is not."""
    scheduler, due = soak._scheduler, every(5)
    free = scheduler._free_blocks

    def wrong(request: Any) -> None:
        free(request)
        if due():
            scheduler.requests[request.request_id] = request

    scheduler._free_blocks = wrong


def the_worker_never_hears_of_the_last(soak: VllmSoak) -> None:
    engine = soak._llm.llm_engine
    step = engine.step
    engine.step = lambda: step() if engine.has_unfinished_requests() else []


def the_prefix_cache_is_not_emptied(soak: VllmSoak) -> None:
    soak._llm.reset_prefix_cache = lambda: False


def the_scheduler_counts_a_row_too_many(soak: VllmSoak) -> None:
    scheduler = soak._scheduler
    update = scheduler.update_from_output

    def wrong(*args: Any, **kwargs: Any) -> Any:
        outputs = update(*args, **kwargs)
        for request in scheduler.running[3:4]:
            request.num_computed_tokens += 1
        return outputs

    scheduler.update_from_output = wrong


def requests_are_aborted_unasked(soak: VllmSoak) -> None:
    engine, due = soak._llm.llm_engine, every(17)
    step = engine.step

    def wrong() -> Any:
        running = soak._scheduler.running
        if due() and running:
            engine.abort_request([running[0].request_id], internal=True)
        return step()

    engine.step = wrong


def answers_end_early(soak: VllmSoak) -> None:
    engine = soak._llm.llm_engine
    add = engine.add_request

    def wrong(name: str, prompt: Any, params: Any) -> None:
        params.max_tokens = min(params.max_tokens, 20)
        add(name, prompt, params)

    engine.add_request = wrong


MUTANTS = {
    leases_are_kept: "I6 staging_pages_are_free_or_owned_by_one: .* of requests that are gone: ",
    a_lease_is_lost: "I6 staging_pages_are_free_or_owned_by_one: ",
    staging_begins_in_the_schedulers_blocks: "I6 staging_pages_are_free_or_owned_by_one: .*"
    "blocks, and first staging page: 42, expected 41",
    a_lease_is_denied: "I1 every_draft_was_staged: .* refused: ",
    a_window_stays_open: "I6 no_window_open_between_steps: ",
    one_row_too_few: "I1 accepted_row_missing: ",
    one_row_too_many: "I1 rejected_row_in_durable_page: ",
    a_draft_is_not_counted: "I1 counters_reconcile: ",
    a_commit_raises: "I6 the_engine_runs: .* raised ZeroDivisionError: nine",
    a_block_is_lost: "I6 pages_are_free_or_owned_by_one: .* neither free nor owned: ",
    a_block_counts_an_owner_too_many: "I6 pages_are_free_or_owned_by_one: .* owners by block: ",
    blocks_stay_with_a_request_that_is_gone: "I6 everything_is_returned: .* free blocks: ",
    a_request_stays_with_the_scheduler: "I6 everything_is_returned: .* requests: ",
    the_worker_never_hears_of_the_last: "I6 everything_is_returned: .* staging pages in use: ",
    the_prefix_cache_is_not_emptied: "I6 everything_is_returned: .* cache emptied: ",
    the_scheduler_counts_a_row_too_many: "I1 durable_rows_are_the_accepted_tokens: ",
    requests_are_aborted_unasked: "I6 everything_is_returned: .* requests that never ended: ",
    answers_end_early: "I5 tokens_are_those_without_speculation: ",
}
"""What breaks the engine, and what the soak has to say first."""


def soaked(*options: str) -> tuple[int, str]:
    """Run the command; return its exit code and what it prints, on one line."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = cli.main([*COMMAND, *options])
    return code, " ".join(text.getvalue().split())


def forked(work: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """Do something in a fork; return what it returns."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)  # nothing of the parent's is to be cleaned up
    os.close(write)
    with os.fdopen(read) as end:
        text = end.read()
    os.waitpid(child, 0)
    return tuple(json.loads(text or '[-1, "the fork died"]'))


def main(record: str) -> None:
    """Soak a sound engine, then the broken ones."""
    engine = VllmSoak()
    close, engine.close = engine.close, lambda: None
    cli.start = lambda name: engine
    found = {"sound": soaked("--check-every", "2", "--seconds", "6", "--json", record)}
    for mutant in MUTANTS:

        def broken(mutant: Callable[[VllmSoak], None] = mutant) -> tuple[int, str]:
            mutant(engine)
            return soaked("--check-every", "1", "--seconds", "20")

        found[mutant.__name__] = forked(broken)
    print("FOUND", json.dumps(found))
    close()


if __name__ == "__main__":
    main(sys.argv[1])
