//! Names of the socket options that shared memory does not emulate, for `shunt status` and `shunt
//! explain`.

/// A socket option that the program has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketOption {
    /// The level, as in setsockopt(2).
    pub level: i32,
    /// The name, as in setsockopt(2).
    pub name: i32,
}

impl SocketOption {
    /// Returns the option in one word, which is never 0: no level has an option 0.
    pub fn pack(self) -> u64 {
        (self.level as u32 as u64) << 32 | u64::from(self.name as u32)
    }

    /// Returns the option in a word, if there is one.
    pub fn unpack(word: u64) -> Option<SocketOption> {
        (word as u32 != 0).then_some(SocketOption { level: (word >> 32) as i32, name: word as i32 })
    }
}

impl std::fmt::Display for SocketOption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SocketOption { level, name } = *self;
        if let Some((.., word)) = NAMES.iter().find(|(of, number, _)| (*of, *number) == (level, name)) {
            return f.write_str(word);
        }
        match LEVELS.iter().find(|(number, _)| *number == level) {
            Some((_, word)) => write!(f, "option {name} of {word}"),
            None => write!(f, "option {name} of level {level}"),
        }
    }
}

const SOCKET: i32 = 1;
const IP: i32 = 0;
const TCP: i32 = 6;
const IPV6: i32 = 41;

const LEVELS: &[(i32, &str)] = &[
    (SOCKET, "SOL_SOCKET"),
    (IP, "IPPROTO_IP"),
    (TCP, "IPPROTO_TCP"),
    (IPV6, "IPPROTO_IPV6"),
    (282, "SOL_TLS"),
];

/// Linux's option values, which never change.
const NAMES: &[(i32, i32, &str)] = &[
    (SOCKET, 20, "SO_RCVTIMEO"),
    (SOCKET, 21, "SO_SNDTIMEO"),
    (SOCKET, 22, "SO_SECURITY_AUTHENTICATION"),
    (SOCKET, 23, "SO_SECURITY_ENCRYPTION_TRANSPORT"),
    (SOCKET, 24, "SO_SECURITY_ENCRYPTION_NETWORK"),
    (SOCKET, 25, "SO_BINDTODEVICE"),
    (SOCKET, 26, "SO_ATTACH_FILTER"),
    (SOCKET, 29, "SO_TIMESTAMP"),
    (SOCKET, 35, "SO_TIMESTAMPNS"),
    (SOCKET, 37, "SO_TIMESTAMPING"),
    (SOCKET, 42, "SO_PEEK_OFF"),
    (SOCKET, 47, "SO_MAX_PACING_RATE"),
    (SOCKET, 50, "SO_ATTACH_BPF"),
    (SOCKET, 51, "SO_ATTACH_REUSEPORT_CBPF"),
    (SOCKET, 52, "SO_ATTACH_REUSEPORT_EBPF"),
    (SOCKET, 61, "SO_TXTIME"),
    (SOCKET, 62, "SO_BINDTOIFINDEX"),
    (SOCKET, 63, "SO_TIMESTAMP_NEW"),
    (SOCKET, 64, "SO_TIMESTAMPNS_NEW"),
    (SOCKET, 65, "SO_TIMESTAMPING_NEW"),
    (SOCKET, 66, "SO_RCVTIMEO_NEW"),
    (SOCKET, 67, "SO_SNDTIMEO_NEW"),
    (SOCKET, 68, "SO_DETACH_REUSEPORT_BPF"),
    (SOCKET, 71, "SO_NETNS_COOKIE"),
    (SOCKET, 76, "SO_PASSPIDFD"),
    (SOCKET, 77, "SO_PEERPIDFD"),
    (SOCKET, 78, "SO_DEVMEM_LINEAR"),
    (SOCKET, 79, "SO_DEVMEM_DMABUF"),
    (SOCKET, 80, "SO_DEVMEM_DONTNEED"),
    (TCP, 14, "TCP_MD5SIG"),
    (TCP, 19, "TCP_REPAIR"),
    (TCP, 20, "TCP_REPAIR_QUEUE"),
    (TCP, 21, "TCP_QUEUE_SEQ"),
    (TCP, 22, "TCP_REPAIR_OPTIONS"),
    (TCP, 24, "TCP_TIMESTAMP"),
    (TCP, 29, "TCP_REPAIR_WINDOW"),
    (TCP, 31, "TCP_ULP"),
    (TCP, 32, "TCP_MD5SIG_EXT"),
    (TCP, 35, "TCP_ZEROCOPY_RECEIVE"),
    (TCP, 36, "TCP_INQ"),
    (TCP, 37, "TCP_TX_DELAY"),
    (TCP, 38, "TCP_AO_ADD_KEY"),
    (TCP, 39, "TCP_AO_DEL_KEY"),
    (TCP, 40, "TCP_AO_INFO"),
    (TCP, 42, "TCP_AO_REPAIR"),
    (TCP, 43, "TCP_IS_MPTCP"),
    (IP, 3, "IP_HDRINCL"),
    (IP, 4, "IP_OPTIONS"),
    (IP, 5, "IP_ROUTER_ALERT"),
    (IP, 16, "IP_IPSEC_POLICY"),
    (IP, 17, "IP_XFRM_POLICY"),
    (IP, 18, "IP_PASSSEC"),
    (IP, 19, "IP_TRANSPARENT"),
    (IP, 21, "IP_MINTTL"),
    (IP, 22, "IP_NODEFRAG"),
    (IP, 23, "IP_CHECKSUM"),
    (IP, 25, "IP_RECVFRAGSIZE"),
    (IP, 26, "IP_RECVERR_RFC4884"),
    (IP, 32, "IP_MULTICAST_IF"),
    (IP, 33, "IP_MULTICAST_TTL"),
    (IP, 34, "IP_MULTICAST_LOOP"),
    (IP, 35, "IP_ADD_MEMBERSHIP"),
    (IP, 36, "IP_DROP_MEMBERSHIP"),
    (IP, 50, "IP_UNICAST_IF"),
    (IP, 51, "IP_LOCAL_PORT_RANGE"),
    (IPV6, 1, "IPV6_ADDRFORM"),
    (IPV6, 17, "IPV6_MULTICAST_IF"),
    (IPV6, 18, "IPV6_MULTICAST_HOPS"),
    (IPV6, 19, "IPV6_MULTICAST_LOOP"),
    (IPV6, 20, "IPV6_JOIN_GROUP"),
    (IPV6, 21, "IPV6_LEAVE_GROUP"),
    (IPV6, 22, "IPV6_ROUTER_ALERT"),
    (IPV6, 24, "IPV6_MTU"),
    (IPV6, 32, "IPV6_FLOWLABEL_MGR"),
    (IPV6, 33, "IPV6_FLOWINFO_SEND"),
    (IPV6, 50, "IPV6_PKTINFO"),
    (IPV6, 53, "IPV6_RECVHOPOPTS"),
    (IPV6, 54, "IPV6_HOPOPTS"),
    (IPV6, 55, "IPV6_RTHDRDSTOPTS"),
    (IPV6, 56, "IPV6_RECVRTHDR"),
    (IPV6, 57, "IPV6_RTHDR"),
    (IPV6, 58, "IPV6_RECVDSTOPTS"),
    (IPV6, 59, "IPV6_DSTOPTS"),
    (IPV6, 60, "IPV6_RECVPATHMTU"),
    (IPV6, 62, "IPV6_DONTFRAG"),
    (IPV6, 72, "IPV6_ADDR_PREFERENCES"),
    (IPV6, 73, "IPV6_MINHOPCOUNT"),
    (IPV6, 74, "IPV6_ORIGDSTADDR"),
    (IPV6, 75, "IPV6_TRANSPARENT"),
    (IPV6, 76, "IPV6_UNICAST_IF"),
    (IPV6, 77, "IPV6_RECVFRAGSIZE"),
    (IPV6, 78, "IPV6_FREEBIND"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_options_has_none_without_a_name() {
        let (mut level, mut rows) = (None, 0);
        for line in include_str!("../../../../docs/options.md").lines() {
            if let Some(title) = line.strip_prefix("## ") {
                level = LEVELS.iter().find(|(_, word)| *word == title).map(|(number, _)| *number);
            }
            let mut cells = line.split(" | ");
            let number = cells.nth(1).and_then(|cell| cell.parse().ok());
            if let (Some(level), Some(name), true) = (level, number, line.contains("| socket_option |")) {
                let named = SocketOption { level, name }.to_string();
                assert!(!named.starts_with("option "), "{named}: {line}");
                rows += 1;
            }
        }
        assert!(rows > 20, "only {rows} rows");
    }

    #[test]
    fn an_option_keeps_its_name_through_a_word() {
        let named =
            |level, name| SocketOption::unpack(SocketOption { level, name }.pack()).unwrap().to_string();
        assert_eq!(named(TCP, 36), "TCP_INQ");
        assert_eq!(named(IP, 21), "IP_MINTTL");
        assert_eq!(named(TCP, 99), "option 99 of IPPROTO_TCP");
        assert_eq!(named(-1, -7), "option -7 of level -1");
        assert_eq!(SocketOption::unpack(0), None);
    }
}
