//! The TLS configuration of both ends of a connection.

use std::sync::{Arc, LazyLock};

use ::aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls13_signature_with_raw_key,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, Error, PeerIncompatible, ServerConfig,
    ServerConnection, SignatureScheme,
};

/// The first byte of a TLS connection, from either end.
pub const FIRST_BYTE: u8 = 0x16;

/// Returns the TLS state of the side that has connected.
pub fn caller() -> Connection {
    static CONFIG: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| Arc::new(client_config()));
    // The name is not sent, and not checked: the listener has no host name.
    let nobody = ServerName::try_from("listener.invalid").expect("it is a name");
    ClientConnection::new(CONFIG.clone(), nobody).expect("the configuration is sound").into()
}

/// Returns the TLS state of the side that listens.
pub fn listener() -> Connection {
    static CONFIG: LazyLock<Arc<ServerConfig>> = LazyLock::new(|| Arc::new(server_config()));
    ServerConnection::new(CONFIG.clone()).expect("the configuration is sound").into()
}

/// Does the work of a thread's first handshake: generates the listener's key, and starts the
/// thread's random generator, which can take 100 ms.
pub fn prepare() {
    let (mut caller, mut listener) = (caller(), listener());
    while caller.is_handshaking() || listener.is_handshaking() {
        hand_over(&mut caller, &mut listener);
        hand_over(&mut listener, &mut caller);
    }
}

fn hand_over(from: &mut Connection, to: &mut Connection) {
    let mut bytes = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut bytes).expect("a vector takes everything");
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        to.read_tls(&mut rest).expect("a handshake is short");
        to.process_new_packets().expect("both ends are sound");
    }
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> =
        LazyLock::new(|| Arc::new(aws_lc_rs::default_provider()));
    PROVIDER.clone()
}

fn client_config() -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
    let verifier = Arc::new(AnyKey(provider().signature_verification_algorithms));
    let mut config = builder
        .expect("the provider has TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    config.enable_sni = false;
    config.resumption = rustls::client::Resumption::disabled();
    config
}

fn server_config() -> ServerConfig {
    let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).expect("the kernel has random bytes");
    let pkcs8 = pair.to_pkcs8v1().expect("it was just made");
    let key = PrivateKeyDer::Pkcs8(pkcs8.as_ref().to_vec().into());
    let key = provider().key_provider.load_private_key(key).expect("it was just made");
    let public = key.public_key().expect("it has one").as_ref().to_vec();
    let resolver =
        AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(vec![public.into()], key)));
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
    let mut config = builder
        .expect("the provider has TLS 1.3")
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(resolver));
    // A relay's listener must not send anything on a connection that is kept ready. Sessions are
    // not resumed.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config
}

/// Accepts any public key whose owner has signed the handshake.
#[derive(Debug)]
struct AnyKey(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_can_be_prepared_more_than_once() {
        prepare();
        prepare();
    }
}
