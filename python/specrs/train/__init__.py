"""Training of a draft head for a model, on one GPU or the CPU: `specrs train-head`.

    documents -> answers -> rows -> teacher -> eagle3 | block -> trainer -> measured -> card

`documents` reads the user's text and holds some of it out, `answers` has the model write text of its own, `rows` lays
both end to end. The `teacher` is the model itself, in the engine's own forward pass: features and scores come from it
as they are needed, and nothing of them is stored. `heads` is what all forms of heads share, `eagle3` and `block` are
the heads, `trainer` the loop with its checkpoints; `measured` asks the engine what the head is worth, and `card` writes
that down. Importing a module of this package imports torch.
"""
