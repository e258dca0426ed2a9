"""Public contract checks, and problems with a known optimum, for tests here and in other packages."""

from rco.testing.contracts import check_objective, check_searcher
from rco.testing.exporter_checks import check_exporter
from rco.testing.format_checks import check_format
from rco.testing.problems import (
    NetworkObjective,
    QuadraticObjective,
    enumerate_feasible,
    random_problem,
    true_optimum,
)

__all__ = [
    "NetworkObjective",
    "QuadraticObjective",
    "check_exporter",
    "check_format",
    "check_objective",
    "check_searcher",
    "enumerate_feasible",
    "random_problem",
    "true_optimum",
]
