"""Training of the small target model that ships with specrs.

The stages, in order: `data`, `train_target`, and `specrs train-head` for its EAGLE-3 head; `run.sh` runs them all.
"""
