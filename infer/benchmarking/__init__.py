"""The parts of `python -m infer.benchmark`: suites, sides, the journal, figures, scores, reports, plots."""
