"""The methods that RCO is compared with: one searcher per file, all with the same interface."""
