//! An echo server and client on smol. Its reactor, async-io, sleeps in an epoll instance by inline
//! system calls, while std reads and writes through libc.

use anyhow::Result;
use shunt_runtimes::{CONNECTIONS, Role, converse, role};
use smol::io::{AsyncReadExt, AsyncWriteExt};
use smol::net::{TcpListener, TcpStream};
use std::path::PathBuf;

fn main() -> Result<()> {
    match role()? {
        Role::Serve(port) => smol::block_on(serve(port)),
        Role::Ask(port, gate) => smol::block_on(ask_all(port, gate)),
    }
}

async fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        smol::spawn(echo(stream)).detach();
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
    let asking: Vec<_> =
        (0..CONNECTIONS).map(|connection| smol::spawn(ask(port, connection, gate.clone()))).collect();
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
