"""Your own loop over the engine: requests join while others run, and one is aborted; `step` is one round of all.

python examples/engine_loop.py
"""

from __future__ import annotations

from specrs import LLM, FinishReason, RequestOutput, SamplingParams

# Prompts by step, as from a queue of your server.
ARRIVALS = {0: "def quicksort(items):", 2: "import os\n", 3: "class Stack:"}
ABORTED_AT = 6  # the step at which the client of the second request hangs up


def serve(llm: LLM) -> dict[int, RequestOutput]:
    """Run until nothing is left, and return outputs by request."""
    outputs: dict[int, RequestOutput] = {}
    arrivals = dict(ARRIVALS)
    ids: list[int] = []
    step = 0
    while arrivals or llm.unfinished:
        if step in arrivals:
            ids.append(llm.add(arrivals.pop(step), SamplingParams(max_tokens=40, seed=len(ids))))
            print(f"step {step}: request {ids[-1]} joins")
        events = llm.step()
        if step == ABORTED_AT and (last := llm.abort(ids[1])) is not None:
            events.append(last)
        for event in events:
            if event.token_ids:
                print(f"step {step}: request {event.request_id} +{len(event.token_ids)} {event.text!r}")
            if event.output is not None:
                outputs[event.request_id] = event.output
                print(f"step {step}: request {event.request_id} ends by {event.output.finish_reason}")
        step += 1
    return outputs


def main() -> None:
    with LLM(max_batch=4) as llm:
        outputs = serve(llm)
        llm.audit()  # every page is back
    done = [o for o in outputs.values() if o.finish_reason is not FinishReason.ABORT]
    print(f"-- {len(outputs)} requests, {len(done)} of them whole")


if __name__ == "__main__":
    main()
