//! Runs Kafka in the server's container. Needs its jars: `mvn -f
//! tests/breadth/breadth/programs/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory=DIR`,
//! and OVERLAY_KAFKA=DIR.

use std::fs;
use std::process::Command;

use super::lab::{B, Lab, SERVER, await_until};

/// Returns a command of Kafka's in Java. Its log goes to standard error, because tests parse the
/// tools' standard output.
pub(crate) fn java(lab: &Lab, host: usize, is_supervised: bool, words: &[&str]) -> Command {
    let mut command = lab.command(host, is_supervised, "java");
    command.args(options(lab)).args(words);
    command
}

/// Returns the options of Java.
pub(crate) fn options(lab: &Lab) -> Vec<String> {
    let jars = std::env::var("OVERLAY_KAFKA").expect("OVERLAY_KAFKA names the directory with Kafka's jars");
    let logging = "Configuration:\n  Appenders:\n    Console:\n      name: OUT\n      target: SYSTEM_ERR\n  Loggers:\n    Root:\n      level: WARN\n      AppenderRef:\n        - ref: OUT\n";
    fs::write(lab.path("log.yaml"), logging).unwrap();
    let logging = format!("-Dlog4j2.configurationFile={}", lab.path("log.yaml").display());
    vec!["-Xmx512m".into(), "-XX:TieredStopAtLevel=1".into(), "-cp".into(), format!("{jars}/*"), logging]
}

/// Starts one node with an empty store, and waits until it listens.
pub(crate) fn serve(lab: &mut Lab) {
    let settings = format!(
        "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:9093\n\
         listeners=PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093\n\
         advertised.listeners=PLAINTEXT://{SERVER}:9092\ncontroller.listener.names=CONTROLLER\n\
         listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT\nlog.dirs={}\n\
         offsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\nnum.partitions=3\n",
        lab.path("kafka").display()
    );
    fs::write(lab.path("settings"), settings).unwrap();
    let path = lab.path("settings").display().to_string();
    let format = ["kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", &path];
    let output = lab.output(B, &mut java(lab, B, false, &format));
    assert!(output.status.success(), "{output:?}");
    let mut kafka = java(lab, B, true, &["kafka.Kafka", &path]);
    let launched = lab.launch(B, &mut kafka, "");
    await_until(|| lab.listening(B, 9092) > 0, || lab.said(launched));
}
