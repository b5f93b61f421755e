"""The package under the libraries that people train and run Qwen3 with: each test compares a kernelized model with the plain one.

tests/cpu, tests/gpu and tests/multigpu import the tests from here and give them the fixtures `qwen3` (the loaded package; what
a test patches is put back) and `device`. The mark `integration` names the row of the table in docs/integrations.md that a test stands for.
"""
