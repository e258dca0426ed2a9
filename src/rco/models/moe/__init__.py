"""Mixture-of-experts layers: their layout and routing; gating, scoring and removal of experts."""
