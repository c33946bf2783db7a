"""Training of the small target model and its EAGLE-3 head that ship with specrs.

The stages, in order: `data`, `train_target`, `generate`, `train_head`, `evaluate`, `export`; `run.sh` runs them all.
"""
