"""Run an engine in processes of its own and print what it gave, as one line of JSON.

python generate.py MODEL PROMPTS.json [--tp N] [--k K]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--silent", action="store_true")
    args = parser.parse_args()

    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    speculative = {
        "method": "custom_class",
        "model": "drafters.ScriptedDrafter",
        "num_speculative_tokens": args.k,
    }
    llm = LLM(
        args.model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        block_size=32,
        num_gpu_blocks_override=160,
        enforce_eager=True,
        disable_log_stats=False,
        tensor_parallel_size=args.tp,
        speculative_config=None if args.silent else speculative,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in json.loads(args.prompts.read_text())],
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
        use_tqdm=False,
    )
    metrics = {
        sample.name: sample.value
        for family in REGISTRY.collect()
        if family.name.startswith(("nwor:", "vllm:spec_decode_num"))
        for sample in family.samples
        if sample.name.endswith("_total") or "staging_pages" in sample.name
    }
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print()
    print(json.dumps({"tokens": tokens, "metrics": metrics}))


if __name__ == "__main__":
    main()
