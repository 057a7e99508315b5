use offbeat_core::dtype::Dtype;
use offbeat_core::spec::*;
use offbeat_core::table::*;
use offbeat_net::client::*;
use offbeat_net::server::*;
use std::time::*;
fn cpu(who: &str) -> f64 {
    let s = std::fs::read_to_string(format!("/proc/{who}/stat")).unwrap();
    let v: Vec<&str> = s.rsplit(')').next().unwrap().split_whitespace().collect();
    (v[11].parse::<f64>().unwrap() + v[12].parse::<f64>().unwrap()) / 100.0
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let n: usize = a[1].parse().unwrap();
    let w: usize = a[2].parse().unwrap();
    let secs: f64 = a[3].parse().unwrap();
    let model = a.get(4).is_some_and(|m| m == "model");
    if let Ok(addr) = std::env::var("ADDR") {
        let config = ClientConfig {
            address: addr,
            worker_id: None,
            token: None,
            run_id: None,
            in_flight: std::env::var("IF").map_or(1, |x| x.parse().unwrap()),
            connect_timeout: Duration::from_secs(10),
        };
        let never = || false;
        let mut c = Client::connect(config, None, &never).unwrap();
        c.configure(Contribution::Gradient, None, &never).unwrap();
        let mut g = 1_f32.to_le_bytes().repeat(n);
        let mut out = vec![0; n * 4];
        c.pull(&[Memory::of(&mut out)], false, &never).unwrap();
        let t = Instant::now();
        let mut k = 0u64;
        while t.elapsed().as_secs_f64() < secs {
            let values = [Some(Memory::of(&mut g))];
            c.push_pull(PushInput { values: &values, samples: 1 }, &[Memory::of(&mut out)], true, &never)
                .unwrap();
            k += 1;
        }
        println!("{} {} {}", k, t.elapsed().as_secs_f64(), cpu("self"));
        c.close(true, &never).unwrap();
        return;
    }
    let rule =
        Rule::Sgd { momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false, maximize: false };
    let sgd = OptimizerSpec {
        groups: vec![Group { pattern: "*".into(), lr: 1e-6, rule }],
        momentum_correction: false,
    };
    let table = TensorTable::new(vec![TensorSpec {
        name: "w".into(),
        aliases: vec![],
        shape: vec![n as u64],
        dtype: Dtype::F32,
        role: Role::Parameter,
    }])
    .unwrap();
    let server = Server::start(
        ServerConfig {
            optimizer: Some(sgd),
            transaction: if model { Transaction::Model } else { Transaction::Fragment },
            ..ServerConfig::default()
        },
        Some((table, vec![vec![0; n * 4]])),
    )
    .unwrap();
    let exe = std::env::current_exe().unwrap();
    let c0 = cpu("self");
    let ch: Vec<_> = (0..w)
        .map(|_| {
            std::process::Command::new(&exe)
                .args(&a[1..])
                .env("ADDR", format!("127.0.0.1:{}", server.address().port()))
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let (mut ups, mut tot, mut ccpu) = (0.0, 0.0, 0.0);
    for c in ch {
        let o = c.wait_with_output().unwrap();
        let v: Vec<f64> =
            String::from_utf8(o.stdout).unwrap().split_whitespace().map(|x| x.parse().unwrap()).collect();
        ups += v[0] / v[1];
        tot += v[0];
        ccpu += v[2];
    }
    let s = cpu("self") - c0;
    let hw = std::fs::read_to_string("/proc/self/status")
        .unwrap()
        .lines()
        .find(|l| l.starts_with("VmHWM"))
        .unwrap()
        .to_string();
    println!(
        "offbeat n={n} w={w} ups={ups:.1} srv_us={:.2} cli_us={:.2} srv_s_per_gb={:.3} {hw} {}",
        s / tot * 1e6,
        ccpu / tot * 1e6,
        s / (tot * n as f64 * 8.0 / 1e9),
        serde_json::from_str::<serde_json::Value>(&server.status_json().unwrap()).unwrap()["longest_poll_ms"]
    );
}
