"""Mixture-of-experts layers: where they are, how they route, and how experts are gated, scored and removed."""
