//! The theorem of exact speculation: what tree verification emits is what plain decoding draws, for every tree and
//! sampler; and both follow the target's distribution.

use crate::common::{Mix, chi_square_accepts, random_parents};
use proptest::prelude::*;
use specrs::Error;
use specrs::host::sample::{Sampler, Scratch};
use specrs::host::verify::Verifier;
use specrs::round::{Accepts, SamplerConfig, TreeBatch};

/// A model whose logits are a function of all tokens so far.
struct Oracle {
    vocab: usize,
    seed: u64,
}

impl Oracle {
    fn logits(&self, tokens: &[i32]) -> Vec<f32> {
        let mut mix = Mix(tokens.iter().fold(self.seed, |h, &t| Mix(h ^ t as u64).next()));
        (0..self.vocab).map(|_| mix.normal() * 3.0).collect()
    }

    /// Logits of every node of a tree under `context` (the tokens before the root).
    fn tree_logits(&self, context: &[i32], parents: &[i32], tokens: &[i32]) -> Vec<f32> {
        let mut paths: Vec<Vec<i32>> = vec![];
        let mut logits = vec![];
        for (&parent, &token) in parents.iter().zip(tokens) {
            let mut path = usize::try_from(parent).map_or_else(|_| context.to_vec(), |p| paths[p].clone());
            path.push(token);
            logits.extend(self.logits(&path));
            paths.push(path);
        }
        logits
    }
}

/// A tree whose tokens are often what the sampler will draw, so that walks go deep, and otherwise random.
fn random_tree(
    mix: &mut Mix,
    oracle: &Oracle,
    sampler: &Sampler,
    tokens: &[i32],
    max_nodes: usize,
) -> (Vec<i32>, Vec<i32>) {
    let nodes = 1 + mix.below(max_nodes);
    let parents = random_parents(mix, nodes);
    let mut paths: Vec<Vec<i32>> = vec![vec![]];
    let mut drafts = vec![*tokens.last().unwrap()];
    for &parent in &parents[1..] {
        let path = paths[parent as usize].clone();
        let draft = if mix.below(3) > 0 {
            let row = oracle.logits(&[tokens, &path].concat());
            sampler.draw(&mut Scratch::default(), &row, (tokens.len() + path.len()) as u32, &path).unwrap()
        } else {
            mix.below(oracle.vocab) as i32
        };
        drafts.push(draft);
        paths.push([path, vec![draft]].concat());
    }
    (parents, drafts)
}

/// Token by token.
fn decode_plain(oracle: &Oracle, mut sampler: Sampler, prompt: &[i32], new: usize) -> Vec<i32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..new {
        let t = sampler.draw(&mut Scratch::default(), &oracle.logits(&tokens), tokens.len() as u32, &[]).unwrap();
        sampler.commit(&[t]).unwrap();
        tokens.push(t);
    }
    tokens.split_off(prompt.len())
}

fn sampler_configs() -> impl Strategy<Value = SamplerConfig> {
    let temperature = prop_oneof![Just(0.0), 0.3..1.5f64];
    let top_k = prop_oneof![Just(0), 1..20i64];
    let top_p = prop_oneof![Just(1.0), 0.3..1.0f64];
    let min_p = prop_oneof![Just(0.0), 0.0..0.3f64];
    let penalty = || prop_oneof![Just(0.0), -1.0..2.0f64];
    let repetition = prop_oneof![Just(1.0), 0.7..1.6f64];
    let bias = prop::collection::btree_map(0..5i32, -3.0..3.0f32, 0..3);
    (temperature, top_k, top_p, min_p, any::<u64>(), repetition, penalty(), penalty(), bias).prop_map(
        |(temperature, top_k, top_p, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty, bias)| {
            let logit_bias = bias.into_iter().collect();
            SamplerConfig {
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logit_bias,
                allowed: None,
            }
        },
    )
}

/// Speculative rounds over a batch until each request has `new` tokens; with the number of accepted drafts.
fn decode_in_trees(
    mix: &mut Mix,
    oracle: &Oracle,
    requests: &[(Vec<i32>, SamplerConfig)],
    new: usize,
    max_nodes: usize,
) -> (Vec<Vec<i32>>, usize) {
    let vocab = oracle.vocab as u32;
    let mut samplers: Vec<Sampler> =
        requests.iter().map(|(prompt, config)| Sampler::new(vocab, prompt, config.clone()).unwrap()).collect();
    let mut tokens: Vec<Vec<i32>> = requests.iter().map(|(prompt, _)| prompt.clone()).collect();
    // Prefill draws the first token, which is the first root.
    for (sampler, tokens) in samplers.iter_mut().zip(&mut tokens) {
        let t = sampler.draw(&mut Scratch::default(), &oracle.logits(tokens), tokens.len() as u32, &[]).unwrap();
        sampler.commit(&[t]).unwrap();
        tokens.push(t);
    }
    let (mut verifier, mut accepts, mut accepted) = (Verifier::default(), Accepts::default(), 0);
    while (0..requests.len()).any(|i| tokens[i].len() < requests[i].0.len() + new) {
        let (parents, drafts): (Vec<_>, Vec<_>) =
            (0..requests.len()).map(|i| random_tree(mix, oracle, &samplers[i], &tokens[i], max_nodes)).unzip();
        let trees = TreeBatch::from_parents(&parents, &drafts).unwrap();
        let mut logits = vec![];
        for i in 0..requests.len() {
            logits.extend(oracle.tree_logits(&tokens[i][..tokens[i].len() - 1], &parents[i], &drafts[i]));
        }
        let lens: Vec<u32> = tokens.iter().map(|t| t.len() as u32 - 1).collect();
        verifier.verify(&trees, &logits, &samplers.iter().collect::<Vec<_>>(), &lens, &mut accepts).unwrap();
        assert_eq!(accepts.len(), requests.len());
        for i in 0..requests.len() {
            let (path, emitted) = (accepts.path(i), accepts.tokens(i));
            assert_eq!((path[0], path.len()), (0, emitted.len()));
            for (step, pair) in path.windows(2).enumerate() {
                assert_eq!(parents[i][pair[1] as usize], pair[0] as i32);
                assert_eq!(drafts[i][pair[1] as usize], emitted[step]);
            }
            accepted += path.len() - 1;
            samplers[i].commit(emitted).unwrap();
            tokens[i].extend(emitted);
        }
    }
    let outputs = tokens.iter().zip(requests).map(|(t, (prompt, _))| t[prompt.len()..][..new].to_vec()).collect();
    (outputs, accepted)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The theorem: same tokens as plain decoding, for any trees, batch and samplers.
    #[test]
    fn trees_emit_what_plain_decoding_draws(
        configs in prop::collection::vec(sampler_configs(), 1..4), vocab in 5..40usize, max_nodes in 2..40usize, seed in any::<u64>(),
    ) {
        let mut mix = Mix(seed);
        let oracle = Oracle { vocab, seed };
        let requests: Vec<(Vec<i32>, SamplerConfig)> = configs.into_iter()
            .map(|config| ((0..1 + mix.below(6)).map(|_| mix.below(vocab) as i32).collect(), config))
            .collect();
        let new = 24;
        let (outputs, accepted) = decode_in_trees(&mut mix, &oracle, &requests, new, max_nodes);
        for (output, (prompt, config)) in outputs.iter().zip(&requests) {
            let sampler = Sampler::new(vocab as u32, prompt, config.clone()).unwrap();
            prop_assert_eq!(output, &decode_plain(&oracle, sampler, prompt, new));
        }
        // Guards against a vacuous test: two drafts of three are right, so walks are deep where trees are.
        prop_assert!(max_nodes < 12 || accepted >= 6 * requests.len(), "{} drafts accepted", accepted);
    }
}

/// Three tokens decoded through trees follow the product of the model's conditional distributions.
#[test]
fn tokens_through_trees_follow_the_distribution() {
    let oracle = Oracle { vocab: 4, seed: 8 };
    for (n, (top_p, min_p, temperature)) in [(1.0, 0.0, 1.0), (1.0, 0.0, 2.0), (0.9, 0.02, 1.5)].into_iter().enumerate()
    {
        let prompt = vec![2, 1];
        let config = SamplerConfig { temperature, top_p, min_p, ..SamplerConfig::default() };
        let mut expected = vec![1.0; 64];
        for (cell, p) in expected.iter_mut().enumerate() {
            let mut context = prompt.clone();
            for shift in [4, 2, 0] {
                let token = (cell >> shift & 3) as i32;
                *p *= probabilities(&config, &oracle.logits(&context))[token as usize];
                context.push(token);
            }
        }
        let mut counts = vec![0u32; 64];
        let mut mix = Mix(n as u64);
        for seed in 0..12_000 {
            let requests = [(prompt.clone(), SamplerConfig { seed, ..config.clone() })];
            let (outputs, _) = decode_in_trees(&mut mix, &oracle, &requests, 3, 12);
            let cell = outputs[0].iter().fold(0, |cell, &t| cell << 2 | t as usize);
            counts[cell] += 1;
        }
        assert!(chi_square_accepts(&counts, &expected), "{config:?}: {counts:?}");
    }
}

/// Temperature, top-p and min-p in f64 by definition.
fn probabilities(config: &SamplerConfig, row: &[f32]) -> Vec<f64> {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = row.iter().map(|x| (f64::from(x - max) / config.temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    let heavier = |w: f64| weights.iter().filter(|&&o| o > w).sum::<f64>(); // no ties here
    let keep = |w: f64| heavier(w) < config.top_p * total && w >= config.min_p;
    let kept: f64 = weights.iter().filter(|&&w| keep(w)).sum();
    weights.iter().map(|&w| if keep(w) { w / kept } else { 0.0 }).collect()
}

/// Rounds large enough to be spread over threads give what one request at a time gives.
#[test]
fn verification_does_not_depend_on_threads() {
    let (batch, vocab) = (16, 32_768);
    let mut mix = Mix(4);
    let parents: Vec<Vec<i32>> = (0..batch).map(|_| random_parents(&mut mix, 6)).collect();
    let tokens: Vec<Vec<i32>> = (0..batch).map(|_| (0..6).map(|_| mix.below(3) as i32).collect()).collect();
    let mut logits: Vec<f32> = (0..batch * 6 * vocab).map(|_| mix.unit() as f32).collect();
    // The first three tokens carry nearly all the mass, so that walks go down.
    logits.chunks_mut(vocab).for_each(|row| row[..3].iter_mut().for_each(|x| *x += 15.0));
    let samplers: Vec<Sampler> = (0..batch as u64)
        .map(|seed| {
            let config = SamplerConfig { temperature: (seed % 3) as f64 * 0.5, top_p: 0.9, seed, ..Default::default() };
            Sampler::new(vocab as u32, &[], config).unwrap()
        })
        .collect();
    let samplers: Vec<&Sampler> = samplers.iter().collect();
    let lens: Vec<u32> = (0..batch as u32).collect();
    let (mut verifier, mut all, mut one) = (Verifier::default(), Accepts::default(), Accepts::default());
    let trees = TreeBatch::from_parents(&parents, &tokens).unwrap();
    verifier.verify(&trees, &logits, &samplers, &lens, &mut all).unwrap();
    for i in 0..batch {
        let tree = TreeBatch::from_parents(&parents[i..=i], &tokens[i..=i]).unwrap();
        let rows = &logits[i * 6 * vocab..][..6 * vocab];
        verifier.verify(&tree, rows, &samplers[i..=i], &lens[i..=i], &mut one).unwrap();
        assert_eq!((all.path(i), all.tokens(i)), (one.path(0), one.tokens(0)));
    }
    assert!((0..batch).any(|i| all.path(i).len() > 2));
    // A bad request has a fault of its own, whichever thread meets it; the others are as without it.
    let sound = all.clone();
    logits[4 * 6 * vocab + 9] = f32::NAN;
    logits[11 * 6 * vocab] = f32::INFINITY;
    verifier.verify(&trees, &logits, &samplers, &lens, &mut all).unwrap();
    for (i, &len) in lens.iter().enumerate() {
        let (value, index) = match i {
            4 => ("NaN", 9),
            11 => ("+inf", 0),
            _ => {
                assert_eq!((all.path(i), all.tokens(i), all.fault(i)), (sound.path(i), sound.tokens(i), None));
                continue;
            }
        };
        let (request, row, position) = (i as i64, 6 * i as i64, i64::from(len) + 1);
        let fault = Error::NonFinite { what: "target logits", value, request, row, position, index };
        assert_eq!((all.path(i), all.tokens(i), all.fault(i)), (&[0][..], &[][..], Some(&fault)));
    }
    verifier.verify(&trees, &logits[..0], &samplers, &lens, &mut all).unwrap_err();
    assert!(all.is_empty() && all.fault(4).is_none(), "nothing stays of an earlier round");
}

/// Plain decoding of an oracle whose logits fail at one length of context, and rounds over trees: the same tokens, and
/// then the same fault, in the middle of a walk too.
#[test]
fn a_fault_in_a_walk_comes_after_the_tokens_of_plain_decoding() {
    let (vocab, context) = (5, [3, 1, 4]);
    let oracle = Oracle { vocab, seed: 77 };
    let mut mid_walk = 0;
    for seed in 0..200u64 {
        let mut mix = Mix(seed);
        let config = SamplerConfig { temperature: (seed % 2) as f64, seed, ..SamplerConfig::default() };
        let sampler = Sampler::new(vocab as u32, &[], config).unwrap();
        let (parents, drafts) = random_tree(&mut mix, &oracle, &sampler, &context, 12);
        let depth = 1 + mix.below(4); // tokens from the root on, at which the model fails
        let mut logits = oracle.tree_logits(&context[..2], &parents, &drafts);
        let mut paths: Vec<Vec<i32>> = vec![];
        for (node, (&parent, &token)) in parents.iter().zip(&drafts).enumerate() {
            let mut path = usize::try_from(parent).map_or_else(|_| vec![], |p| paths[p].clone());
            path.push(token);
            if path.len() == depth {
                logits[node * vocab + 2] = f32::NAN;
            }
            paths.push(path);
        }
        let plain = decode_plain(&oracle, sampler.clone(), &context, depth);
        let trees = TreeBatch::from_parents(&[parents], &[drafts]).unwrap();
        let (mut verifier, mut accepts) = (Verifier::default(), Accepts::default());
        verifier.verify(&trees, &logits, &[&sampler], &[2], &mut accepts).unwrap();
        let (path, tokens) = (accepts.path(0), accepts.tokens(0));
        assert_eq!(tokens, &plain[..tokens.len()], "seed {seed}");
        match accepts.fault(0) {
            // The walk ended before the bad row: its last token is not a draft, and the model was not asked further.
            None => assert!(path.len() == tokens.len() && tokens.len() < depth, "seed {seed}"),
            Some(fault) => {
                let row = i64::from(path[depth - 1]);
                let want = Error::NonFinite {
                    what: "target logits",
                    value: "NaN",
                    request: 0,
                    row,
                    position: 2 + depth as i64,
                    index: 2,
                };
                assert_eq!((path.len(), tokens.len(), fault), (depth, depth - 1, &want), "seed {seed}");
                mid_walk += usize::from(depth > 1);
            }
        }
    }
    assert!(mid_walk > 20, "{mid_walk} walks failed below the root");
}

/// Finite logits that bias and penalties spoil say so; logits that came bad say that.
#[test]
fn faults_tell_the_model_from_the_parameters() {
    let forbid_all =
        SamplerConfig { logit_bias: vec![(0, f32::NEG_INFINITY), (1, f32::NEG_INFINITY)], ..SamplerConfig::default() };
    let (sampler, greedy) =
        (Sampler::new(2, &[], forbid_all).unwrap(), Sampler::new(2, &[], SamplerConfig::default()).unwrap());
    let trees = TreeBatch::from_parents(&[[-1], [-1], [-1]], &[[0], [0], [0]]).unwrap();
    let (mut verifier, mut accepts) = (Verifier::default(), Accepts::default());
    let logits = [0.0, 1.0, 0.0, f32::NAN, 0.0, 1.0];
    verifier.verify(&trees, &logits, &[&sampler, &sampler, &greedy], &[7; 3], &mut accepts).unwrap();
    let text = |i| accepts.fault(i).map(ToString::to_string);
    let edited = "target logits after logit_bias and penalties: all -inf at request 0, row 0, position 8, index 0";
    assert_eq!(text(0).as_deref(), Some(edited));
    assert_eq!(text(1).as_deref(), Some("target logits: NaN at request 1, row 1, position 8, index 1"));
    assert_eq!((text(2), accepts.tokens(2)), (None, &[1][..]));
}

#[test]
fn verification_reads_walked_rows_only_and_follows_the_first_of_equal_siblings() {
    let greedy = Sampler::new(3, &[], SamplerConfig::default()).unwrap();
    // Root 0; children 1 (token 2), 2 (token 1), 3 (token 1 again, as two draft ids may map to one token).
    let trees = TreeBatch::from_parents(&[[-1, 0, 0, 0]], &[[0, 2, 1, 1]]).unwrap();
    let nan = [f32::NAN; 3];
    let logits = [[0.0, 9.0, 0.0], nan, [5.0, 0.0, 0.0], nan].concat();
    let (mut verifier, mut accepts) = (Verifier::default(), Accepts::default());
    verifier.verify(&trees, &logits, &[&greedy], &[7], &mut accepts).unwrap();
    assert_eq!((accepts.path(0), accepts.tokens(0)), (&[0, 2][..], &[1, 0][..]));
    assert_eq!((accepts.path(1), accepts.tokens(1)), (&[][..], &[][..]), "no such request");
}

#[test]
fn verification_refuses_what_does_not_fit() {
    let sampler = |vocab| Sampler::new(vocab, &[], SamplerConfig::default()).unwrap();
    let (three, four) = (sampler(3), sampler(4));
    let trees = TreeBatch::from_parents(&[[-1, 0], [-1, 0]], &[[0, 1], [0, 1]]).unwrap();
    let (mut verifier, mut accepts) = (Verifier::default(), Accepts::default());
    let mut run = |logits: usize, samplers: &[&Sampler], lens: &[u32]| {
        verifier.verify(&trees, &vec![0.0; logits], samplers, lens, &mut accepts)
    };
    assert!(run(12, &[&three, &three], &[1, 2]).is_ok());
    assert!(matches!(run(12, &[&three], &[1, 2]), Err(Error::Mismatch { operand: "samplers", .. })));
    assert!(matches!(run(12, &[&three, &three], &[1]), Err(Error::Mismatch { operand: "lens", .. })));
    let vocabularies = run(12, &[&three, &four], &[1, 2]);
    assert!(matches!(vocabularies, Err(Error::Mismatch { operand: "sampler vocabulary", .. })));
    assert!(matches!(run(11, &[&three, &three], &[1, 2]), Err(Error::Mismatch { operand: "target logits", .. })));
    assert!(matches!(run(12, &[&three, &three], &[1, u32::MAX]), Err(Error::Overflow { what: "token position", .. })));
    let empty = TreeBatch::default();
    assert!(verifier.verify(&empty, &[], &[], &[], &mut accepts).is_ok());
    assert_eq!(accepts.len(), 0);
    assert_eq!((empty.offsets(), empty.len(), empty.range(0)), (&[0][..], 0, 0..0));
}
