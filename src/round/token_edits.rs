//! The edits of a request's logits before temperature, token by token.

use super::token_mask::TokenMask;

/// Bias and history of a request by token: what a device needs of a sampler besides its parameters. The tokens of a walk
/// come on top.
///
/// The three arrays are equally long; entry i is about `tokens[i]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenEdits {
    /// Tokens, strictly ascending.
    pub tokens: Vec<i32>,
    /// Bias, 0 for none.
    pub biases: Vec<f32>,
    /// Times that the token is in the output; 0 where it is in the prompt alone, -1 where it is in neither.
    pub outputs: Vec<i32>,
}

impl TokenEdits {
    /// The same with a bias of -inf on every token that is not in the mask.
    pub(crate) fn masked(&self, mask: &TokenMask) -> Self {
        let mut all = Self::default();
        let mut next = 0;
        for token in 0..mask.vocab() {
            let listed = self.tokens.get(next) == Some(&(token as i32));
            if listed || !mask.contains(token) {
                let (bias, outputs) = if listed { (self.biases[next], self.outputs[next]) } else { (0.0, -1) };
                all.tokens.push(token as i32);
                all.biases.push(if mask.contains(token) { bias } else { f32::NEG_INFINITY });
                all.outputs.push(outputs);
            }
            next += usize::from(listed);
        }
        all
    }
}
