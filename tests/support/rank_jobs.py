"""What the ranks of tests/test_distributed.py do; a module of its own, so that their processes can import it."""

import contextlib
import io
import os
import signal
import time

import torch

import rco
from rco.distributed import join, serve, shared
from rco.testing import QuadraticObjective, random_problem

SETTINGS = {"steps": 6, "samples": 5, "seed": 2, "refine": 16, "batches_per_sample": 2}


def make_objective():
    return QuadraticObjective(8, 3, seed=3, num_batches=5, batch_noise=0.2)


def search(dies_at=None, path=None, resume=None):
    """One search by all ranks; the last rank kills itself at a step, if asked to."""
    problem = random_problem(3, 8, 3)

    def on_checkpoint(state):
        if path is not None:
            torch.save(state, path)

    with join(timeout=5.0) as ranks:
        objective = make_objective()
        if not ranks.first:
            if dies_at is not None and ranks.index == ranks.count - 1:
                calm = objective.loss

                def loss(gates, batch, calls=[0]):  # noqa: B006
                    calls[0] += 1
                    if calls[0] > dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return calm(gates, batch)

                objective.loss = loss
            serve(objective, ranks)
            return None
        with shared(objective, ranks) as together:
            state = None if resume is None else torch.load(resume, weights_only=True)
            result = rco.RCO(**SETTINGS).search(problem, together, on_checkpoint=on_checkpoint, resume=state)
    described = result.to_dict()
    described.pop("seconds")
    for record in described["history"]:
        record.pop("seconds")
    return described


def fail(rank):
    with join(timeout=5.0) as ranks:

        def share(items):
            if ranks.index == rank:
                raise ValueError("no room on this device")
            return [0 for _ in items]

        return ranks.map(share, 8)


def collect(items):
    with join(timeout=5.0) as ranks:
        squares = ranks.map(lambda mine: [item**2 for item in mine], items)
        told = ranks.broadcast(f"from {ranks.index}")
        done = []
        if ranks.first:
            for number in range(3):
                ranks.call("note", number)
            ranks.dismiss()
        else:
            ranks.follow({"note": done.append})
        try:
            ranks.require_same("number", ranks.index // 2)
        except ValueError as error:
            return squares, told, done, str(error)


def hang():
    with join(timeout=0.02) as ranks:
        if ranks.index == 1:
            time.sleep(4)
            return None
        return ranks.gather(lambda: 1)


def terminated():
    with join(timeout=5.0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def quantize_in_memory(folder, most_blocks=None):
    """Candidates, sensitivities and a search on a small random model: (hashes of files, differences, result)."""
    from fractions import Fraction

    from rco.compression.budget import Budget
    from rco.compression.candidates import CandidateSettings
    from rco.compression.compression import Compression
    from rco.compression.plan import make_plan
    from rco.data.calibration import CalibrationSet
    from rco.models.loading import wrap_model
    from rco.store import CandidateStore
    from rco.testing.tiny_models import tiny_model

    tokens = torch.randint(96, (6, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    data = CalibrationSet(tokens, mask, ("random",) * 6, "random", 0, "calibration")
    with join(timeout=5.0) as ranks:
        loaded = wrap_model(tiny_model("llama"))
        linears = loaded.layout.linears(loaded.model, include_head=True)
        plan = make_plan(loaded.layout, linears, group_size=None, widths=(2, 3, 4))
        settings = CandidateSettings(batch_size=2, clip="minmax", sweeps=0)
        backend = Compression(loaded, plan, folder, settings=settings, ranks=ranks)
        if most_blocks is not None and ranks.first:
            enter, entered = CandidateStore.enter, []

            def stop(store, index, entry):
                if len(entered) == most_blocks:
                    os.kill(os.getpid(), signal.SIGKILL)
                entered.append(index)
                enter(store, index, entry)

            CandidateStore.enter = stop
        backend.candidates(data)
        differences = backend.differences(data, seed=3)
        backend.use_differences(differences)
        files = {block: entry["sha256"] for block, entry in backend.store.manifest["blocks"].items()}
        result = None
        with backend.objective(data.select(slice(0, 4)), data.select(slice(4, 6))) as objective:
            if ranks.first:
                with shared(objective, ranks) as together:
                    searcher = rco.RCO(steps=3, samples=3, refine=4)
                    found = searcher.search(backend.problem(Budget("bits", Fraction(3))), together)
                result = (found.allocation.tolist(), found.loss, [record.loss for record in found.history])
            else:
                serve(objective, ranks)
    return files, differences.tolist(), result


def command(arguments, dies_at=None):
    """``rco`` with some arguments: exit code, stdout, stderr; the last rank kills itself at a loss, if asked to."""
    from rco.cli import main
    from rco.compression.language_model_objective import LanguageModelObjective
    from rco.pipeline import tune_stage

    tune_stage._CALL_SECONDS = 0.0  # waiting ranks are called at every step
    if dies_at is not None and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        calm, calls = LanguageModelObjective.loss, []

        def loss(*given):
            calls.append(None)
            if len(calls) > dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return calm(*given)

        LanguageModelObjective.loss = loss
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def fail_at_a_block(folder, rank, blocks):
    """Candidates of six blocks; one rank fails when it has made so many."""
    from rco.compression import candidates
    from rco.compression.candidates import CandidateSettings
    from rco.compression.compression import Compression
    from rco.compression.plan import make_plan
    from rco.models.loading import wrap_model
    from rco.testing.search_cases import random_tokens
    from rco.testing.tiny_models import tiny_model

    with join(timeout=5.0) as ranks:
        loaded = wrap_model(tiny_model("llama", num_hidden_layers=6))
        linears = loaded.layout.linears(loaded.model)
        plan = make_plan(loaded.layout, linears, widths=(2, 4), group_size=None)
        quantize, made = candidates.quantize_matrix, [0]

        def failing(*arguments):
            made[0] += 1
            if ranks.index == rank and made[0] > blocks * len(linears) // 6:
                raise MemoryError("no room for another block")
            return quantize(*arguments)

        candidates.quantize_matrix = failing
        settings = CandidateSettings(method="rtn", clip="minmax")
        backend = Compression(loaded, plan, folder, settings=settings, ranks=ranks)
        backend.candidates(random_tokens(loaded, 2, 16))
