<?php
// Asks a web server for pages by ext/curl on one connection that is kept, and compares each answer.
//
//     php fetch.php PORT REQUESTS GATE
//
// The page must say back `METHOD QUERY LENGTH DIGEST` of what it was sent. The requests are repeated until
// there is a file of the last name. Prints one digest over all answers.
[, $port, $count, $gate] = $argv;
$handle = curl_init();
curl_setopt_array($handle, [CURLOPT_RETURNTRANSFER => true, CURLOPT_TIMEOUT => 20]);
do {
    $over = file_exists($gate);
    $digest = hash_init("md5");
    for ($turn = 0; $turn < $count; $turn++) {
        $body = $turn % 2 ? str_repeat(chr(65 + $turn % 26), 1 + $turn * 97 % 5000) : "";
        curl_setopt($handle, CURLOPT_URL, "http://127.0.0.1:$port/?$turn");
        curl_setopt($handle, CURLOPT_HTTPGET, true);
        if ($body !== "") {
            curl_setopt($handle, CURLOPT_POSTFIELDS, $body);
        }
        $page = curl_exec($handle);
        $method = $body === "" ? "GET" : "POST";
        $want = "$method $turn " . strlen($body) . " " . md5($body) . "\n";
        if ($page === false || !str_starts_with($page, $want)) {
            fwrite(STDERR, "$turn: " . curl_error($handle) . " " . substr((string) $page, 0, 200) . "\n");
            exit(1);
        }
        hash_update($digest, $page);
    }
    clearstatcache();
} while (!$over);
echo hash_final($digest), "\n";
