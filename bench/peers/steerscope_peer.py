"""steerscope through the same driver as its peers: the transformers engine, one call for the whole batch."""

import torch
from _common import Cell, Job, Outcome, main  # pyright: ignore[reportMissingImports]


def build(job: Job) -> dict[str, Cell]:
    import steerscope as ss

    engine = ss.load(str(job.model), max_batch=len(job.prompts))
    prompts = [ss.TokenPrompt(ids) for ids in job.prompts.tolist()]
    sampling = ss.Sampling(max_tokens=job.max_new_tokens, ignore_eos=True)
    add = ss.Add(vector=job.steering_vector(engine.facts.hidden), layers=job.layer)

    def run(steer: ss.Add | None, capture: ss.Capture | None) -> Outcome:
        done = engine.generate(prompts, sampling, steer=steer, capture=capture)
        rows = [rows for one in done for rows in one.rows.values()] if capture else []
        for one in done:
            if one.capture is not None:
                one.capture.close()
        return Outcome(torch.tensor([one.token_ids for one in done]), rows)

    return {
        "plain": lambda: run(None, None),
        "capture": lambda: run(None, ss.Capture()),
        "steer": lambda: run(add, None),
    }


if __name__ == "__main__":
    main("steerscope", "steerscope", build)
