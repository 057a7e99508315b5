//! torch.optim's single-tensor statements, and those of delayed Nesterov as its paper has them, one function per tensor operation, rounded as its CPU kernels round.
//!
//! Each function says what one torch call does to one element; `step` repeats `_single_tensor_*` line by line. Run
//! with `F = f32` it is the oracle for bits, with `F = f64` for the formula.

use offbeat_core::spec::Rule;

/// What the statements need of a float: f32 with its rounding, or f64.
pub(crate) trait Float: Copy + PartialOrd {
    fn of(x: f64) -> Self;
    fn plus(self, y: Self) -> Self;
    fn times(self, y: Self) -> Self;
    fn over(self, y: Self) -> Self;
    fn root(self) -> Self;
    fn fused(self, y: Self, z: Self) -> Self;
}

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Float for $type {
            fn of(x: f64) -> Self { x as $type }
            fn plus(self, y: Self) -> Self { self + y }
            fn times(self, y: Self) -> Self { self * y }
            fn over(self, y: Self) -> Self { self / y }
            fn root(self) -> Self { self.sqrt() }
            fn fused(self, y: Self, z: Self) -> Self { self.mul_add(y, z) }
        }
    )*};
}
float!(f32, f64);

fn neg<F: Float>(x: F) -> F {
    x.times(F::of(-1.0))
}

/// `x.add(y, alpha=a)`
fn add<F: Float>(x: F, y: F, a: f64) -> F {
    F::of(a).fused(y, x)
}

/// `x.mul(a)`
fn mul<F: Float>(x: F, a: f64) -> F {
    x.times(F::of(a))
}

/// `x.lerp(y, a)`
fn lerp<F: Float>(x: F, y: F, a: f64) -> F {
    let (a, difference) = (F::of(a), y.plus(neg(x)));
    if a < F::of(0.5) { a.fused(difference, x) } else { a.plus(F::of(-1.0)).fused(difference, y) }
}

/// `x.addcmul(y, z, value=a)`
fn addcmul<F: Float>(x: F, y: F, z: F, a: f64) -> F {
    F::of(a).times(y).fused(z, x)
}

/// `x.addcdiv(y, z, value=a)`
fn addcdiv<F: Float>(x: F, y: F, z: F, a: f64) -> F {
    x.plus(F::of(a).times(y).over(z))
}

/// One element's optimizer, with torch's state.
#[derive(Clone)]
pub(crate) struct Element<F> {
    pub(crate) param: F,
    step: u32,
    buffer: Option<F>,
    mean: F,
    square: F,
    largest: F,
    waiting: F,
}

impl<F: Float> Element<F> {
    pub(crate) fn new(rule: &Rule, param: F) -> Self {
        let square = match rule {
            Rule::Adagrad { initial_accumulator_value, .. } => *initial_accumulator_value,
            _ => 0.0,
        };
        Self {
            param,
            step: 0,
            buffer: None,
            mean: F::of(0.0),
            square: F::of(square),
            largest: F::of(0.0),
            waiting: F::of(0.0),
        }
    }

    pub(crate) fn step(&mut self, rule: &Rule, grad: F, lr: f64) {
        self.step += 1;
        let step = f64::from(self.step);
        match *rule {
            Rule::Sgd { momentum, dampening, weight_decay, nesterov, maximize } => {
                let mut grad = self.gradient(grad, weight_decay, maximize);
                if momentum != 0.0 {
                    let buffer = match self.buffer {
                        None => grad,
                        Some(buffer) => add(mul(buffer, momentum), grad, 1.0 - dampening),
                    };
                    self.buffer = Some(buffer);
                    grad = if nesterov { add(grad, buffer, momentum) } else { buffer };
                }
                self.param = add(self.param, grad, -lr);
            }
            Rule::Adam {
                betas: (beta1, beta2),
                eps,
                weight_decay,
                amsgrad,
                maximize,
                decoupled_weight_decay,
            } => {
                let coupled = if decoupled_weight_decay { 0.0 } else { weight_decay };
                let grad = self.gradient(grad, coupled, maximize);
                if decoupled_weight_decay && weight_decay != 0.0 {
                    self.param = mul(self.param, 1.0 - lr * weight_decay);
                }
                self.mean = lerp(self.mean, grad, 1.0 - beta1);
                self.square = addcmul(mul(self.square, beta2), grad, grad, 1.0 - beta2);
                let step_size = lr / (1.0 - beta1.powf(step));
                let bias_correction2_sqrt = (1.0 - beta2.powf(step)).powf(0.5);
                if amsgrad && self.largest < self.square {
                    self.largest = self.square;
                }
                let square = if amsgrad { self.largest } else { self.square };
                let denominator = square.root().over(F::of(bias_correction2_sqrt)).plus(F::of(eps));
                self.param = addcdiv(self.param, self.mean, denominator, -step_size);
            }
            Rule::Adagrad { lr_decay, weight_decay, initial_accumulator_value: _, eps, maximize } => {
                let grad = self.gradient(grad, weight_decay, maximize);
                let lr = lr / (1.0 + (step - 1.0) * lr_decay);
                self.square = addcmul(self.square, grad, grad, 1.0);
                self.param = addcdiv(self.param, grad, self.square.root().plus(F::of(eps)), -lr);
            }
            Rule::RmsProp { alpha, eps, weight_decay, momentum, centered, maximize } => {
                let grad = self.gradient(grad, weight_decay, maximize);
                self.square = addcmul(mul(self.square, alpha), grad, grad, 1.0 - alpha);
                let mut variance = self.square;
                if centered {
                    self.mean = lerp(self.mean, grad, 1.0 - alpha);
                    variance = addcmul(self.square, self.mean, self.mean, -1.0);
                }
                let denominator = variance.root().plus(F::of(eps));
                if momentum > 0.0 {
                    let buffer = self.buffer.unwrap_or(F::of(0.0));
                    let buffer = addcdiv(mul(buffer, momentum), grad, denominator, 1.0);
                    self.buffer = Some(buffer);
                    self.param = add(self.param, buffer, -lr);
                } else {
                    self.param = addcdiv(self.param, grad, denominator, -lr);
                }
            }
            Rule::DelayedNesterov { momentum, delay, activation } => {
                let num = delay as f64;
                self.waiting = add(self.waiting, grad, 1.0);
                let mut velocity = self.buffer.unwrap_or(F::of(0.0));
                let mut share = activation;
                if u64::from(self.step).is_multiple_of(delay) {
                    velocity = add(mul(velocity, momentum), self.waiting.over(F::of(num)), 1.0);
                    share = 1.0 - activation * num + activation;
                    self.waiting = F::of(0.0);
                }
                self.buffer = Some(velocity);
                let ahead = add(grad.over(F::of(num)), velocity, share * momentum);
                self.param = add(self.param, ahead, -lr);
            }
            Rule::Add => self.param = add(self.param, grad, 1.0),
        }
    }

    fn gradient(&self, grad: F, weight_decay: f64, maximize: bool) -> F {
        let grad = if maximize { neg(grad) } else { grad };
        if weight_decay == 0.0 { grad } else { add(grad, self.param, weight_decay) }
    }
}
