"""A small random model with tuned weights: candidates, an allocation that mixes widths, and text."""

import torch

from rco.compression.candidates import CandidateSettings
from rco.compression.compression import Compression
from rco.compression.plan import make_plan
from rco.compression.tuning import TuningSettings, TuningText, tune
from rco.core.problem import Allocation
from rco.data.calibration import CalibrationSet
from rco.models.loading import wrap_model
from rco.models.moe.linears import model_linears
from rco.models.precision import computing_in

QUICK = TuningSettings(
    tokens=6 * 2 * 12, batch_size=2, at_once=1, evaluations=3, code_rate=0.01, scale_rate=0.01
)


def text(vocabulary, sequences, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, 12), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    return CalibrationSet(tokens, mask, ("random",) * sequences, "random", seed, "calibration")


class Case:
    """A small random model with candidates, an allocation that mixes widths, and text."""

    def __init__(self, folder, model, dtype=None, **plan):
        self.loaded = wrap_model(model)
        linears = model_linears(self.loaded.layout, model, include_head=True)
        settings = {"group_size": 8, "widths": (2, 3), **plan}
        made = make_plan(self.loaded.layout, linears, **settings)
        self.compression = Compression(
            self.loaded,
            made,
            folder / "store",
            settings=CandidateSettings(method="rtn", batch_size=2),
            compute_dtype=dtype,
        )
        vocabulary = model.config.vocab_size
        self.text, self.selection = text(vocabulary, 6, 1), text(vocabulary, 3, 2)
        self.compression.candidates(self.text)
        allowed = made.allowed
        choices = [
            [k for k, fits in enumerate(row) if fits][row_number % int(row.sum())]
            for row_number, row in enumerate(allowed)
        ]
        self.allocation = Allocation(choices)
        self.source, self.weights = self.compression.deployed(self.allocation)

    def run(self, settings, weights=None, **arguments):
        compression = self.compression
        texts = [TuningText(each, compression.reference(each)) for each in (self.text, self.selection)]
        with computing_in(self.loaded.model, compression.compute_dtype):
            head = compression.full_head()
            if self.source is self.loaded:
                return tune(self.source, weights or self.weights, head, *texts, settings, **arguments)
            with computing_in(self.source.model, compression.compute_dtype):
                return tune(self.source, weights or self.weights, head, *texts, settings, **arguments)

    def loss(self, compression):
        """Loss of the allocation on the selection text, by the way that runs are measured."""
        with compression.objective(self.selection) as objective:
            gates = self.allocation.one_hot(len(compression.plan.options))
            total = sum(float(objective.loss(gates, batch)) for batch in range(objective.num_batches))
            return total / objective.num_batches
