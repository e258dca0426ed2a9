"""The method: budget manifold, Riemannian Adam, exact knapsack, search. No model library anywhere."""
