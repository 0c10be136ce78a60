// A server and a client of net/http that keep one connection.
//
//	kept serve PORT
//	kept ask PORT REQUESTS GATE
//
// The client makes requests until the file GATE.warm exists, and prints that. When GATE.begin
// exists, it makes REQUESTS requests, and prints that. It ends when GATE exists.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"
)

const page = 1000

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func get(url string, count int) {
	for ; count > 0; count-- {
		answer, err := http.Get(url)
		check(err)
		body, err := io.ReadAll(answer.Body)
		check(err)
		answer.Body.Close()
		if len(body) != page {
			check(fmt.Errorf("%d bytes came", len(body)))
		}
	}
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func wait(name string) {
	for !exists(name) {
		time.Sleep(10 * time.Millisecond)
	}
}

func number(word string) int {
	number, err := strconv.Atoi(word)
	check(err)
	return number
}

func main() {
	address := "127.0.0.1:" + os.Args[2]
	if os.Args[1] == "serve" {
		body := make([]byte, page)
		check(http.ListenAndServe(address, http.HandlerFunc(func(writer http.ResponseWriter, _ *http.Request) { writer.Write(body) })))
	}
	gate := os.Args[4]
	for !exists(gate + ".warm") {
		get("http://"+address, 1)
	}
	fmt.Println("warm")
	wait(gate + ".begin")
	get("http://"+address, number(os.Args[3]))
	fmt.Println("done")
	wait(gate)
}
