//! An echo server and client on monoio, which uses one thread, and io_uring for everything. A
//! buffer belongs to the uring during a read or write.

use anyhow::Result;
use monoio::io::{AsyncReadRent, AsyncReadRentExt, AsyncWriteRentExt};
use monoio::net::{TcpListener, TcpStream};
use shunt_runtimes::{CONNECTIONS, Role, converse, role};
use std::path::PathBuf;

fn main() -> Result<()> {
    let mut runtime = monoio::RuntimeBuilder::<monoio::IoUringDriver>::new().enable_timer().build()?;
    match role()? {
        Role::Serve(port) => runtime.block_on(serve(port)),
        Role::Ask(port, gate) => runtime.block_on(ask_all(port, gate)),
    }
}

async fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    loop {
        let (stream, _) = listener.accept().await?;
        monoio::spawn(echo(stream));
    }
}

async fn echo(mut stream: TcpStream) -> Result<()> {
    let mut buffer = vec![0; 65536];
    loop {
        let (count, read) = stream.read(buffer).await;
        if count? == 0 {
            return Ok(());
        }
        let (written, all) = stream.write_all(read).await;
        written?;
        buffer = all;
    }
}

async fn ask_all(port: u16, gate: PathBuf) -> Result<()> {
    let asking: Vec<_> =
        (0..CONNECTIONS).map(|connection| monoio::spawn(ask(port, connection, gate.clone()))).collect();
    for one in asking {
        println!("{:x}", one.await?);
    }
    Ok(())
}

async fn ask(port: u16, connection: usize, gate: PathBuf) -> Result<u64> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    converse(connection, gate, async move |turn| {
        let (written, turn) = stream.write_all(turn).await;
        written?;
        let (read, answer) = stream.read_exact(vec![0; turn.len()]).await;
        read?;
        Ok((turn, answer))
    })
    .await
}
