<?php
// A row of MariaDB's, by a connection that the child of PHP-FPM keeps.
$database = new mysqli("p:127.0.0.1", "root", "", "sbtest", @mariadb@);
$query = $database->prepare("select name, price from items where id = ?");
$query->bind_param("i", $_GET["number"]);
$query->execute();
header("Content-Type: application/json");
echo json_encode($query->get_result()->fetch_assoc());
