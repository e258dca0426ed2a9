"""The paper's controlled experiments, and measurements of the package's own parts."""
