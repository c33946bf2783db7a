//! What changes a request's logits before temperature, token by token.

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
