"""Measure the host's time a step, without a device: requests, scheduler, batches and outputs.

    python benchmarks/host_time.py [TEST ...] [--runs N] [--prefix-cache] [--prefill-first]
        [--waste] [--profile]

The engine is the real one but for its runner, which only counts: a row samples a token when all of
its tokens are computed. Tests are those of `jaxserve bench`. Times are milliseconds a step; `rest`
is what passes outside the engine's stages: making requests, the loop of `LLM`, and outputs. `start`
and `end` are milliseconds a call, in which a device would have nothing to do: until the first step
is dispatched, and from the results of the last one until the call returns.
"""

import argparse
import cProfile
import math
import pstats
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from jaxserve.engine import Engine
from jaxserve.engine_client import InProcessClient
from jaxserve.execution.batch_builder import BatchBuilder, PackedBatch
from jaxserve.execution.buckets import make_bucket_table
from jaxserve.execution.slot_record import SlotField
from jaxserve.processing.output_processor import OutputProcessor
from jaxserve.processing.request_loop import RequestLoop
from jaxserve.processing.request_maker import RequestMaker
from jaxserve.processing.sampling_limits import SamplingLimits
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.step import StepResult
from server.bench.workloads import WORKLOADS, Workload

VOCAB_SIZE, MAX_MODEL_LEN = 151_936, 4096
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 1024, 8192
PAGE_SIZE, NUM_PAGES = 16, 70_000
STAGES = ("schedule", "build", "commit")


class CountingRunner:
    """A runner whose device only counts tokens; its result is there at once.

    Attributes:
      first_dispatch: when the first step since this was set to infinity was dispatched.
      last_collect: when the newest step was collected.
    """

    def __init__(self, builder: BatchBuilder):
        self._builder = builder
        self._records = np.zeros((MAX_NUM_SEQS, 2), np.int32)  # tokens, computed tokens
        self.first_dispatch, self.last_collect = math.inf, 0.0

    def dispatch(self, batch: PackedBatch) -> StepResult:
        """Count a step; the handle is the result."""
        self.first_dispatch = min(self.first_dispatch, time.perf_counter())
        for buffer in batch.admissions:
            self._admit(self._builder.admission_layout.split(buffer))
        inputs = self._builder.layout(batch.bucket).split(batch.packed)
        self._admit(inputs)
        records = self._records[inputs["slot_ids"][: batch.num_rows]]
        records[:, 1] += inputs["num_scheduled"][: batch.num_rows]
        num_new = (records[:, 0] == records[:, 1]).astype(np.int32)
        records[:, 0] += num_new
        self._records[inputs["slot_ids"][: batch.num_rows]] = records
        tokens = np.full((batch.num_rows, 1), 17, np.int32)
        return StepResult(tokens=tokens, num_new=num_new, is_finite=np.ones(batch.num_rows, bool))

    def collect(self, handle: StepResult) -> StepResult:
        """Give the result back."""
        self.last_collect = time.perf_counter()
        return handle

    def _admit(self, views: dict[str, np.ndarray]) -> None:
        slots = views["admitted_slots"]
        is_used = slots < MAX_NUM_SEQS
        columns = [SlotField.NUM_TOKENS, SlotField.NUM_COMPUTED]
        self._records[slots[is_used]] = views["admitted_records"][is_used][:, columns]


def make_engine(*, enable_prefix_caching: bool, prefill_first: bool) -> Engine:
    """An engine with the sizes that an H200 gets."""
    buckets = make_bucket_table(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        small_row_buckets=(1, 8),
        small_sampler_rows=128,
    )
    builder = BatchBuilder(
        buckets,
        max_num_seqs=MAX_NUM_SEQS,
        page_size=PAGE_SIZE,
        num_pages=(NUM_PAGES,),
        max_pages_per_seq=MAX_MODEL_LEN // PAGE_SIZE,
        vocab_size=VOCAB_SIZE,
        takes_copies=enable_prefix_caching,
    )
    config = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        token_buckets=buckets.token_buckets,
        row_buckets=buckets.row_buckets,
        enable_prefix_caching=enable_prefix_caching,
        prefill_first=prefill_first,
    )
    scheduler = Scheduler(config, (PagePool(NUM_PAGES, PAGE_SIZE),))
    runner: Any = CountingRunner(builder)
    return Engine(scheduler, builder, runner, max_steps_in_flight=2)


class HostRun:
    """The offline door around an engine without a device."""

    def __init__(self, *, enable_prefix_caching: bool, prefill_first: bool = False) -> None:
        self.engine = make_engine(
            enable_prefix_caching=enable_prefix_caching, prefill_first=prefill_first
        )
        self._maker = RequestMaker(
            tokenizer=None,
            limits=SamplingLimits(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN),
            eos_token_ids=(0,),
            default_params=SamplingParams(),
            chat_template=None,
        )
        client, part_tokens = InProcessClient(self.engine), self.engine.scheduler.lookahead_tokens
        self._loop = RequestLoop(client, OutputProcessor(None), part_tokens=part_tokens)

    def run(self, workload: Workload) -> dict[str, float]:
        """Run a workload once, as `LLM.generate` does; milliseconds by stage, see above."""
        prompts = [{"prompt_token_ids": list(ids)} for ids in workload.prompts]
        params = [workload.sampling_params(n, detokenize=False) for n in workload.output_lens]
        before, before_outputs = replace(self.engine.times), self._loop.output_seconds
        runner: Any = self.engine.runner
        runner.first_dispatch = math.inf
        start = time.perf_counter()
        submissions = self._maker.of_prompts(prompts, params, RequestOutputKind.FINAL_ONLY)
        made = time.perf_counter()
        outputs = self._loop.run(submissions, lambda num_new: None)
        end, after = time.perf_counter(), self.engine.times
        assert [len(o.outputs[0].token_ids) for o in outputs] == list(workload.output_lens)
        num_steps = after.num_steps - before.num_steps
        seconds = {stage: getattr(after, stage) - getattr(before, stage) for stage in STAGES}
        of_runner = after.dispatch + after.collect - before.dispatch - before.collect
        seconds["rest"] = end - start - of_runner - sum(seconds.values())
        seconds["of rest: making requests"] = made - start
        seconds["of rest: outputs"] = self._loop.output_seconds - before_outputs
        ends = {"start": runner.first_dispatch - start, "end": end - runner.last_collect}
        return (
            {"steps": float(num_steps)}
            | {k: s / num_steps * 1e3 for k, s in seconds.items()}
            | {k: s * 1e3 for k, s in ends.items()}
        )

    def waste(self, workload: Workload) -> tuple[float, float]:
        """Mean and largest share of the token slots in held pages that hold no token."""
        dispatch, shares = self.engine.runner.dispatch, list[float]()

        def watch(batch: PackedBatch) -> Any:
            shares.append(self.engine.scheduler.unused_slot_share)
            return dispatch(batch)

        self.engine.runner.dispatch = watch
        self.run(workload)
        self.engine.runner.dispatch = dispatch
        return statistics.mean(shares), max(shares)


def main() -> None:
    """Print a line a test; each figure is the least of the runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=list(WORKLOADS), metavar="TEST")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prefix-cache", action="store_true", help="with the prefix cache")
    parser.add_argument("--prefill-first", action="store_true", help="prompts go before decodes")
    parser.add_argument("--waste", action="store_true", help="print the empty slots of pages, too")
    parser.add_argument("--profile", action="store_true", help="print the slowest functions")
    arguments = parser.parse_args()
    host = HostRun(
        enable_prefix_caching=arguments.prefix_cache, prefill_first=arguments.prefill_first
    )
    for name in arguments.tests:
        workload = WORKLOADS[name](VOCAB_SIZE)
        runs = [host.run(workload) for _ in range(arguments.runs)]
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        print(f"{name:17}", ", ".join(f"{key} {value:.3f}" for key, value in best.items()))
        if arguments.waste:
            mean, largest = host.waste(workload)
            print(f"{name:17} slots without a token: mean {mean:.2%}, at most {largest:.2%}")
        if arguments.profile:
            with cProfile.Profile() as profile:
                host.run(workload)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
