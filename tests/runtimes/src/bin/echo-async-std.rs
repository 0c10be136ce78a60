//! An echo server and client on async-std, which has two reactors and its own executor threads.
//! They sleep as smol's do.

use anyhow::Result;
use async_std::io::{ReadExt, WriteExt};
use async_std::net::{TcpListener, TcpStream};
use shunt_runtimes::{CONNECTIONS, Role, converse, role};
use std::path::PathBuf;

fn main() -> Result<()> {
    match role()? {
        Role::Serve(port) => async_std::task::block_on(serve(port)),
        Role::Ask(port, gate) => async_std::task::block_on(ask_all(port, gate)),
    }
}

async fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        async_std::task::spawn(echo(stream));
    }
}

async fn echo(mut stream: TcpStream) -> Result<()> {
    let mut buffer = vec![0; 65536];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..count]).await?;
    }
}

async fn ask_all(port: u16, gate: PathBuf) -> Result<()> {
    let asking: Vec<_> = (0..CONNECTIONS)
        .map(|connection| async_std::task::spawn(ask(port, connection, gate.clone())))
        .collect();
    for one in asking {
        println!("{:x}", one.await?);
    }
    Ok(())
}

async fn ask(port: u16, connection: usize, gate: PathBuf) -> Result<u64> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    converse(connection, gate, async move |turn| {
        stream.write_all(&turn).await?;
        let mut answer = vec![0; turn.len()];
        stream.read_exact(&mut answer).await?;
        Ok((turn, answer))
    })
    .await
}
