"""Run an engine in processes of its own and print what it gave, as one line of JSON.

python generate.py MODEL PROMPTS.json [--tp N] [--k K] [--kill]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any


def kill_in_flight(llm: Any, prompts: list[Any], params: Any) -> str:
    """Kill the process that runs the model in the middle of its windows; return what users see.

    (Kill the engine core instead and vLLM's synchronous client waits for ever, nwor or not.)
    """
    import psutil

    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), prompt, params)
    for _ in range(6):
        llm.llm_engine.step()
    (core,) = multiprocessing.active_children()
    (worker,) = [child for child in psutil.Process(core.pid).children() if "Worker" in child.name()]
    os.kill(worker.pid, signal.SIGKILL)
    try:
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    except Exception as error:  # noqa: BLE001 - the test looks at its type
        return type(error).__name__
    return "none"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--kill", action="store_true", help="kill a first engine, use a second")
    parser.add_argument("--silent", action="store_true")
    args = parser.parse_args()

    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    speculative = {
        "method": "custom_class",
        "model": "drafters.ScriptedDrafter",
        "num_speculative_tokens": args.k,
    }
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 32,
        "num_gpu_blocks_override": 160,
        "enforce_eager": True,
        "disable_log_stats": False,
        "tensor_parallel_size": args.tp,
        "speculative_config": None if args.silent else speculative,
    }
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(args.prompts.read_text())]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    llm = LLM(args.model, **options)
    error = None
    if args.kill:
        error = kill_in_flight(llm, prompts, params)
        llm = LLM(args.model, **options)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.step()  # the engine core ran a step without requests; what it counted is waiting
    metrics = {
        "/".join([sample.name, *filter(None, [sample.labels.get("reason")])]): sample.value
        for family in REGISTRY.collect()
        if family.name.startswith(("nwor:", "vllm:spec_decode_num"))
        for sample in family.samples
        if sample.name.endswith("_total") or "staging_pages" in sample.name
    }
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print()
    print(json.dumps({"tokens": tokens, "metrics": metrics, "error": error}))


if __name__ == "__main__":
    main()
