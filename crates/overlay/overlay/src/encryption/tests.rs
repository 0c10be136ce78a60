use netlink_packet_route::link::InfoKind;

use super::ipsec::{Effect, Policy};
use super::*;

const OWN: &str = "192.168.0.1";
const HOST: &str = "192.168.0.2";
const CONTAINER: &str = "10.50.2.2";
const UDP: u8 = 17;
const TCP: u8 = 6;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A policy for everything between the hosts.
fn all(effect: Effect) -> Policy {
    let net = |address: &str| Some(format!("{address}/32").parse().unwrap());
    Policy { priority: 5, effect, source: net(OWN), destination: net(HOST), protocol: 0, is_narrowed: false }
}

fn ways(policies: &Policies, devices: [Option<Device>; 2]) -> Ways<'_> {
    let [to_container, to_host] = devices;
    Ways {
        policies,
        own: ip(OWN),
        container: ip(CONTAINER),
        host: ip(HOST),
        to_container,
        to_host,
        has_cilium: false,
    }
}

/// Whether the overlay, and the way between the hosts, count as encrypted under IPsec policies.
fn by_ipsec(policies: impl IntoIterator<Item = Policy>) -> (bool, bool) {
    let policies = Policies::new(policies);
    let ways = ways(&policies, [None, None]);
    (ways.is_overlay_encrypted(), ways.are_hosts_encrypted())
}

#[test]
fn an_overlay_is_encrypted_if_any_of_its_packets_are() {
    assert_eq!(by_ipsec([]), (false, false));
    assert_eq!(by_ipsec([all(Effect::Plain)]), (false, false));
    // As Docker has it: the VXLAN packets of some networks, by a mark.
    let docker = Policy { protocol: UDP, is_narrowed: true, ..all(Effect::Encrypts) };
    assert_eq!(by_ipsec([docker]), (true, false));
    assert_eq!(by_ipsec([all(Effect::EncryptsIfPossible)]), (true, false));
    // A tunnel between the containers' networks.
    let tunnel = Policy { destination: Some("10.50.2.0/24".parse().unwrap()), ..all(Effect::Encrypts) };
    assert_eq!(by_ipsec([Policy { source: None, ..tunnel.clone() }]), (true, false));
    let elsewhere = Policy { destination: Some("10.51.0.0/16".parse().unwrap()), ..tunnel };
    assert_eq!(by_ipsec([elsewhere]), (false, false));
}

#[test]
fn hosts_are_encrypted_only_if_every_segment_is() {
    assert_eq!(by_ipsec([all(Effect::Encrypts)]), (true, true));
    assert_eq!(by_ipsec([Policy { protocol: TCP, ..all(Effect::Encrypts) }]), (true, true));
    assert_eq!(by_ipsec([Policy { source: None, destination: None, ..all(Effect::Encrypts) }]), (true, true));
    assert_eq!(by_ipsec([Policy { is_narrowed: true, ..all(Effect::Encrypts) }]), (true, false));
    // The policy with the lower number has precedence, and may exempt some ports.
    for (priority, hosts) in [(4, false), (6, true)] {
        for is_narrowed in [false, true] {
            let exempt = Policy { priority, is_narrowed, ..all(Effect::Plain) };
            assert_eq!(by_ipsec([all(Effect::Encrypts), exempt]), (true, hosts), "{priority} {is_narrowed}");
        }
    }
}

#[test]
fn devices_encrypt_by_their_kind() {
    let none = Policies::default();
    let device = |index, kind| Some(Device::new(index, Some(kind)));
    let plain = || Some(Device::new(1, None));
    let found = |to_container, to_host| {
        let ways = ways(&none, [to_container, to_host]);
        (ways.is_overlay_encrypted(), ways.are_hosts_encrypted())
    };
    assert_eq!(found(plain(), plain()), (false, false));
    assert_eq!(found(device(2, InfoKind::Vxlan), plain()), (false, false));
    assert_eq!(found(None, None), (false, false));
    for kind in [InfoKind::Wireguard, InfoKind::Xfrm, InfoKind::Vti] {
        assert_eq!(found(device(2, kind.clone()), plain()), (true, false));
        assert_eq!(found(device(2, kind.clone()), device(3, kind)), (true, true));
    }
    assert_eq!(found(device(2, InfoKind::Tun), plain()), (true, false));
    assert_eq!(found(device(2, InfoKind::Tun), device(3, InfoKind::Tun)), (true, false));
    assert_eq!(found(device(2, InfoKind::Tun), device(2, InfoKind::Tun)), (true, true));
}

#[test]
fn cilium_encrypts_by_a_device_of_its_own() {
    let none = Policies::default();
    let ways = Ways { has_cilium: true, ..ways(&none, [None, None]) };
    assert!(ways.is_overlay_encrypted() && !ways.are_hosts_encrypted());
}

#[test]
fn the_kernel_answers() {
    let mut devices = Devices::open().unwrap();
    let loopback = devices.towards(ip("127.0.0.1")).unwrap().unwrap();
    assert!(!loopback.may_encrypt());
    assert_eq!(devices.towards(ip("0.0.0.0")), Ok(None));
    assert!(devices.has("lo").unwrap() && !devices.has("shunt-no-device").unwrap());
}

#[test]
fn the_setting_has_three_values() {
    #[derive(Debug, Serialize, Deserialize)]
    struct File {
        encrypted: Encrypted,
    }
    let read =
        |value: &str| toml::from_str::<File>(&format!("encrypted = {value}")).map(|file| file.encrypted);
    for (value, expected) in
        [("\"auto\"", Encrypted::Auto), ("true", Encrypted::Yes), ("false", Encrypted::No)]
    {
        assert_eq!(read(value).unwrap(), expected);
        let written = toml::to_string(&File { encrypted: expected }).unwrap();
        assert_eq!(written, format!("encrypted = {value}\n"));
    }
    for value in ["\"yes\"", "1", "[]"] {
        let error = read(value).unwrap_err().to_string();
        assert!(error.contains("encrypted is \"auto\", true or false"), "{error}");
    }
}
